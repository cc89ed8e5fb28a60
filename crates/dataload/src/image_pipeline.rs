//! Decoding and transforms as one collate function.

use std::cell::RefCell;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use tch::{Kind, Tensor};

use crate::tensor::tensor_from_bytes;
use crate::transforms::Scratch;
use crate::{Canvas, Collate, DataError, Draws, EncodedImage, Image, ToFloat, Transform};

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Decodes every sample of a batch, passes it through the transforms and writes it into its place in the batch.
///
/// The result is a function of (seed, epoch, index) for every sample. Images are RGB.
///
/// ```
/// use overdrive_dataload::{ImagePipeline, RandomHorizontalFlip, RandomResizedCrop};
///
/// let train = ImagePipeline::new(0).then(RandomResizedCrop::new(224)).then(RandomHorizontalFlip::default());
/// ```
///
/// # Shapes
/// `N` samples `(EncodedImage, i64)` give uint8 `[N, 3, H, W]` and int64 `[N]`.
///
/// # Source
/// `torchvision.transforms.Compose` after the loader of `torchvision.datasets.ImageFolder`.
#[derive(Clone)]
#[doc(alias = "Compose")]
pub struct ImagePipeline {
    transforms: Vec<Arc<dyn Transform>>,
    seed: u64,
    channels_last: bool,
    upright: bool,
    dct_scaling: bool,
}

impl ImagePipeline {
    /// Only decodes, as yet.
    pub fn new(seed: u64) -> Self {
        Self { transforms: Vec::new(), seed, channels_last: false, upright: false, dct_scaling: false }
    }

    /// Adds a transform after those before.
    pub fn then(mut self, transform: impl Transform + 'static) -> Self {
        self.transforms.push(Arc::new(transform));
        self
    }

    /// Whether the batch's memory holds the channels of a pixel side by side; off unless set. Its shape stays.
    pub fn channels_last(mut self, channels_last: bool) -> Self {
        self.channels_last = channels_last;
        self
    }

    /// Whether a JPEG file is turned as its EXIF orientation says; off unless set, as in torchvision.
    #[doc(alias = "apply_exif_orientation")]
    pub fn exif_orientation(mut self, upright: bool) -> Self {
        self.upright = upright;
        self
    }

    /// Whether a JPEG file that is to shrink to a half or less is decoded at 1/2, 1/4 or 1/8 of its size, as far as the
    /// result's size allows, and filtered from there; off unless set.
    ///
    /// That saves most of the decoding of large photographs, and changes pixels: torchvision filters the whole image.
    /// It applies to antialiased bilinear and bicubic resizing of a file whose pixels no transform has asked for before.
    ///
    /// # Source
    /// `PIL.Image.draft`; libjpeg's `scale_num`.
    #[doc(alias = "draft")]
    pub fn dct_scaling(mut self, dct_scaling: bool) -> Self {
        self.dct_scaling = dct_scaling;
        self
    }

    /// Makes float32 batches instead, normalised in the worker.
    pub fn to_float(self, to_float: ToFloat) -> FloatPipeline {
        FloatPipeline { pipeline: self, to_float }
    }

    /// Decodes and transforms one sample into `slot`, its `3 * H * W` bytes of a batch.
    ///
    /// # Errors
    /// [`DataError::ImageShape`] when the result has another number of bytes; an error of the decoder or a transform.
    pub fn decode_into(&self, sample: &EncodedImage, slot: &mut [u8]) -> Result<(), DataError> {
        self.with_canvas(sample, |canvas| {
            let (height, width) = (canvas.height(), canvas.width());
            if slot.len() != 3 * height * width {
                return Err(DataError::ImageShape { height, width, channels: 3, bytes: slot.len() });
            }
            canvas.write(self.channels_last, slot)
        })
    }

    /// Passes a decoded image through the transforms.
    ///
    /// # Errors
    /// An error of a transform.
    pub fn image(&self, image: &Image, index: usize, epoch: u64) -> Result<Image, DataError> {
        SCRATCH.with_borrow_mut(|scratch| {
            let mut canvas = Canvas::of_image(image, Path::new("image"), scratch)?;
            self.transform(&mut canvas, index, epoch)?;
            let (height, width) = (canvas.height(), canvas.width());
            let mut bytes = vec![0; 3 * height * width];
            canvas.write(true, &mut bytes)?;
            Image::new(bytes, height, width, 3)
        })
    }

    fn transform(&self, canvas: &mut Canvas<'_>, index: usize, epoch: u64) -> Result<(), DataError> {
        for (position, transform) in self.transforms.iter().enumerate() {
            transform.apply(canvas, &mut Draws::new(self.seed, epoch, index as u64, position as u64))?;
        }
        Ok(())
    }

    fn with_canvas<T>(
        &self,
        sample: &EncodedImage,
        finish: impl FnOnce(Canvas<'_>) -> Result<T, DataError>,
    ) -> Result<T, DataError> {
        SCRATCH.with_borrow_mut(|scratch| {
            let mut canvas = Canvas::open(&sample.bytes, self.upright, &sample.path, scratch)?;
            canvas.dct_scaling(self.dct_scaling);
            self.transform(&mut canvas, sample.index, sample.epoch)?;
            finish(canvas)
        })
    }

    /// The bytes of a batch and the `[height, width]` of its images.
    fn fill(&self, samples: &[(EncodedImage, i64)], channels_last: bool) -> Result<(Vec<u8>, [usize; 2]), DataError> {
        let mut bytes = Vec::new();
        let mut size = None;
        for (position, (sample, _)) in samples.iter().enumerate() {
            let filled = self.with_canvas(sample, |canvas| {
                let [height, width] = [canvas.height(), canvas.width()];
                let expected = *size.get_or_insert([height, width]);
                if expected != [height, width] {
                    let [expected, found] = [expected, [height, width]].map(|[height, width]| vec![3, height, width]);
                    return Err(DataError::ShapeMismatch { position, expected, found });
                }
                let image = 3 * height * width;
                if bytes.is_empty() {
                    bytes.resize(image * samples.len(), 0);
                }
                canvas.write(channels_last, &mut bytes[position * image..][..image])
            });
            filled.map_err(|error| DataError::Sample { index: sample.index, error: Box::new(error) })?;
        }
        Ok((bytes, size.ok_or(DataError::EmptyBatch)?))
    }
}

impl fmt::Debug for ImagePipeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ImagePipeline {{ transforms: {}, seed: {} }}", self.transforms.len(), self.seed)
    }
}

impl Collate<(EncodedImage, i64)> for ImagePipeline {
    type Batch = (Tensor, Tensor);

    fn collate(&self, samples: Vec<(EncodedImage, i64)>) -> Result<Self::Batch, DataError> {
        let (bytes, size) = self.fill(&samples, self.channels_last)?;
        let [images, height, width] = [samples.len(), size[0], size[1]].map(|size| size as i64);
        let batch = match self.channels_last {
            true => {
                let pixels = tensor_from_bytes(&bytes, Kind::Uint8, &[images, height, width, 3])?;
                pixels.f_permute([0, 3, 1, 2])?
            }
            false => tensor_from_bytes(&bytes, Kind::Uint8, &[images, 3, height, width])?,
        };
        let labels: Vec<i64> = samples.iter().map(|(_, label)| *label).collect();
        Ok((batch, Tensor::f_from_slice(&labels)?))
    }
}

/// An [`ImagePipeline`] whose batches are float32; made by [`ImagePipeline::to_float`].
///
/// # Shapes
/// `N` samples `(EncodedImage, i64)` give float32 `[N, 3, H, W]` and int64 `[N]`.
#[derive(Clone, Debug)]
pub struct FloatPipeline {
    pipeline: ImagePipeline,
    to_float: ToFloat,
}

impl Collate<(EncodedImage, i64)> for FloatPipeline {
    type Batch = (Tensor, Tensor);

    fn collate(&self, samples: Vec<(EncodedImage, i64)>) -> Result<Self::Batch, DataError> {
        let (bytes, [height, width]) = self.pipeline.fill(&samples, true)?;
        let images = bytes.chunks_exact(3 * height * width).zip(&samples);
        let images = images.map(|(bytes, (_, label))| Ok((Image::new(bytes, height, width, 3)?, *label)));
        self.to_float.collate(images.collect::<Result<_, DataError>>()?)
    }
}
