//! Decoding and transforms as one collate function.

use std::cell::RefCell;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use overdrive_ffi::{BufferPool, HostBuffer};
use tch::{Kind, Tensor};

use crate::batch_samples::{Listed, Prepared};
use crate::transforms::Scratch;
use crate::{BatchSamples, Canvas, Collate, DataError, Draws, EncodedImage, Image, Stage, ToFloat, Transform};

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Decodes every sample of a batch, passes it through the transforms and writes it straight into the batch's memory.
///
/// The result for a sample is a function of (seed, epoch, draw): a sample that is drawn twice in an epoch gets two
/// different crops, see [`Drawn::draw`](crate::Drawn::draw). Images are RGB.
///
/// ```
/// use overdrive_dataload::{ImagePipeline, RandomHorizontalFlip, RandomResizedCrop};
///
/// let train = ImagePipeline::new(0).then(RandomResizedCrop::new(224)).then(RandomHorizontalFlip::default());
/// ```
///
/// # Shapes
/// `N` samples `(EncodedImage, i64)` give uint8 `[N, 3, H, W]` and int64 `[N]`. The first good image of a batch sets
/// `H` and `W`, and images of another size are bad samples: end with a transform that makes all of one size.
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
    /// Reuses the memory of batches that the training loop has dropped.
    memory: Arc<BufferPool>,
}

impl ImagePipeline {
    /// A pipeline that only decodes; [`then`](Self::then) adds transforms.
    pub fn new(seed: u64) -> Self {
        Self {
            transforms: Vec::new(),
            seed,
            channels_last: false,
            upright: false,
            dct_scaling: false,
            memory: Arc::default(),
        }
    }

    /// Adds a transform after the present ones.
    pub fn then(mut self, transform: impl Transform + 'static) -> Self {
        self.transforms.push(Arc::new(transform));
        self
    }

    /// Whether the batch has the memory format channels-last; off unless set. Its shape does not change.
    pub fn channels_last(mut self, channels_last: bool) -> Self {
        self.channels_last = channels_last;
        self
    }

    /// Whether a JPEG image is rotated and flipped by its EXIF orientation; off unless set, as in torchvision.
    #[doc(alias = "apply_exif_orientation")]
    pub fn exif_orientation(mut self, upright: bool) -> Self {
        self.upright = upright;
        self
    }

    /// Whether a JPEG file that will be resized to half or less is decoded at 1/2, 1/4 or 1/8 of its size, the smallest
    /// that the result allows, and resized from there; off unless set.
    ///
    /// That saves most of the decoding of large photographs. It changes pixels, since torchvision resizes from the
    /// full-size image: photographs of 2000 x 1500 pixels resized to a side of 256 differ by 0.4 levels on average and
    /// by up to 20 at edges. The decoded pixels equal those of Pillow's `draft` bit for bit, the resized ones within
    /// one level (two for bicubic). It applies to antialiased bilinear and bicubic resizing, where no earlier transform
    /// needed the pixels.
    ///
    /// # Source
    /// `PIL.Image.draft`; libjpeg's `scale_num`.
    #[doc(alias = "draft")]
    pub fn dct_scaling(mut self, dct_scaling: bool) -> Self {
        self.dct_scaling = dct_scaling;
        self
    }

    /// Makes float32 batches, normalised in the worker, instead of uint8 ones.
    pub fn to_float(self, to_float: ToFloat) -> FloatPipeline {
        FloatPipeline { pipeline: self, to_float }
    }

    /// Decodes and transforms a sample into `slot`, its `3 * H * W` bytes of the batch; `draw` is its
    /// [`Drawn::draw`](crate::Drawn::draw).
    ///
    /// # Errors
    /// [`DataError::ImageShape`] when the result has another number of bytes; an error of the decoder or a transform.
    pub fn decode_into(&self, sample: &EncodedImage, draw: u64, epoch: u64, slot: &mut [u8]) -> Result<(), DataError> {
        SCRATCH.with_borrow_mut(|scratch| {
            let canvas = self.canvas(sample, draw, epoch, scratch)?;
            let (height, width) = (canvas.height(), canvas.width());
            if slot.len() != 3 * height * width {
                return Err(DataError::ImageShape { height, width, channels: 3, bytes: slot.len() });
            }
            canvas.write(self.channels_last, slot)
        })
    }

    /// Passes a decoded image through the transforms; `draw` is its [`Drawn::draw`](crate::Drawn::draw).
    ///
    /// # Errors
    /// An error of a transform.
    pub fn image(&self, image: &Image, draw: u64, epoch: u64) -> Result<Image, DataError> {
        SCRATCH.with_borrow_mut(|scratch| {
            let mut canvas = Canvas::of_image(image, Path::new("image"), scratch)?;
            self.transform(&mut canvas, draw, epoch)?;
            let (height, width) = (canvas.height(), canvas.width());
            let mut bytes = vec![0; 3 * height * width];
            canvas.write(true, &mut bytes)?;
            Image::new(bytes, height, width, 3)
        })
    }

    fn transform(&self, canvas: &mut Canvas<'_>, draw: u64, epoch: u64) -> Result<(), DataError> {
        for (position, transform) in self.transforms.iter().enumerate() {
            transform.apply(canvas, &mut Draws::new(self.seed, epoch, draw, position as u64))?;
        }
        Ok(())
    }

    /// The transformed image.
    fn canvas<'a>(
        &self,
        sample: &'a EncodedImage,
        draw: u64,
        epoch: u64,
        scratch: &'a mut Scratch,
    ) -> Result<Canvas<'a>, DataError> {
        let mut canvas = Canvas::open(&sample.bytes, self.upright, &sample.path, scratch)?;
        canvas.dct_scaling(self.dct_scaling);
        self.transform(&mut canvas, draw, epoch)?;
        Ok(canvas)
    }

    /// Draws all samples, and decodes each into its slot of the batch.
    fn fill(&self, samples: &mut BatchSamples<'_, (EncodedImage, i64)>, order: Order) -> Result<Filled, DataError> {
        let mut filled: Option<Filled> = None;
        while let Some(drawn) = samples.next()? {
            let (draw, (image, label)) = (drawn.draw(), drawn.sample);
            let (epoch, room, pinned) = (samples.epoch(), samples.len(), samples.pinned() && order.pinnable);
            let (done, times) = match samples.prepared::<Decoded>() {
                Some(Decoded { pixels, times }) => {
                    let add = |(bytes, size): (Vec<u8>, _)| {
                        let filled = self.filled(&mut filled, size, room, pinned)?;
                        filled.add(size, label, |slot| {
                            slot.copy_from_slice(&bytes);
                            Ok(())
                        })
                    };
                    (pixels.and_then(add), times)
                }
                None => self.timed(&image, draw, epoch, |mut canvas, size| {
                    if filled.as_ref().is_none_or(Filled::is_empty) {
                        // Decode before allocating a whole batch of images of this size: the header may be wrong.
                        canvas.pixels()?;
                    }
                    let filled = self.filled(&mut filled, size, room, pinned)?;
                    filled.add(size, label, |slot| canvas.write(order.channels_last, slot))
                }),
            };
            samples.spent(Stage::Decode, times[0]);
            samples.spent(Stage::Transform, times[1]);
            if let Err(error) = done {
                samples.reject(error)?;
            }
        }
        filled.filter(|filled| !filled.is_empty()).ok_or(DataError::EmptyBatch)
    }

    /// The batch that is being filled; the first good image begins it.
    fn filled<'a>(
        &self,
        filled: &'a mut Option<Filled>,
        size: [usize; 2],
        room: usize,
        pinned: bool,
    ) -> Result<&'a mut Filled, DataError> {
        if filled.as_ref().is_none_or(Filled::is_empty) {
            let buffer = self.memory.take(room.saturating_mul(3 * size[0] * size[1]), pinned)?;
            *filled = Some(Filled { buffer, labels: Vec::with_capacity(room), size });
        }
        filled.as_mut().ok_or(DataError::EmptyBatch)
    }

    /// Decodes and transforms an image, and passes it on with its `[height, width]`; returns the times of decoding and of
    /// transforms.
    fn timed<T>(
        &self,
        image: &EncodedImage,
        draw: u64,
        epoch: u64,
        take: impl FnOnce(Canvas<'_>, [usize; 2]) -> Result<T, DataError>,
    ) -> (Result<T, DataError>, [Duration; 2]) {
        let begun = Instant::now();
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.take_decoding_time();
            let done = self.canvas(image, draw, epoch, scratch).and_then(|canvas| {
                let size = [canvas.height(), canvas.width()];
                take(canvas, size)
            });
            let decoding = scratch.take_decoding_time();
            (done, [decoding, begun.elapsed().saturating_sub(decoding)])
        })
    }

    /// An image for a batch that another worker makes.
    fn prepared(&self, image: &EncodedImage, draw: u64, epoch: u64, channels_last: bool) -> Prepared {
        let (pixels, times) = self.timed(image, draw, epoch, |mut canvas, size| {
            canvas.pixels()?;
            let mut bytes = vec![0; 3 * size[0] * size[1]];
            canvas.write(channels_last, &mut bytes)?;
            Ok((bytes, size))
        });
        Prepared(Box::new(Decoded { pixels, times }))
    }
}

/// An image that was decoded for a batch of another worker.
struct Decoded {
    /// Its bytes, and `[height, width]`.
    pixels: Result<(Vec<u8>, [usize; 2]), DataError>,
    /// The times of decoding and of transforms.
    times: [Duration; 2],
}

/// The memory layout of a batch's images.
#[derive(Clone, Copy)]
struct Order {
    channels_last: bool,
    /// Whether the training loop gets this memory, so that pinning it is useful.
    pinnable: bool,
}

/// A batch that is being filled, image by image.
struct Filled {
    buffer: HostBuffer,
    labels: Vec<i64>,
    /// `[height, width]`, which every image has.
    size: [usize; 2],
}

impl Filled {
    fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    fn image_bytes(&self) -> usize {
        3 * self.size[0] * self.size[1]
    }

    /// Adds an image that `write` writes into its slot.
    fn add(
        &mut self,
        size: [usize; 2],
        label: i64,
        write: impl FnOnce(&mut [u8]) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        if size != self.size {
            let [expected, found] = [self.size, size].map(|[height, width]| vec![3, height, width]);
            let (position, others) = (self.labels.len(), Vec::new());
            return Err(DataError::ShapeMismatch { position, expected, found, others });
        }
        let (bytes, position) = (self.image_bytes(), self.labels.len());
        write(&mut self.buffer.as_mut_slice()[position * bytes..][..bytes])?;
        self.labels.push(label);
        Ok(())
    }
}

impl fmt::Debug for ImagePipeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ImagePipeline {{ transforms: {}, seed: {} }}", self.transforms.len(), self.seed)
    }
}

impl Collate<(EncodedImage, i64)> for ImagePipeline {
    type Batch = (Tensor, Tensor);

    /// Uses the samples' positions as their draws, and epoch 0.
    fn collate(&self, samples: Vec<(EncodedImage, i64)>) -> Result<Self::Batch, DataError> {
        self.collate_from(&mut BatchSamples::new(&mut Listed::from(samples), 0, 0, false))
    }

    fn collate_from(&self, samples: &mut BatchSamples<'_, (EncodedImage, i64)>) -> Result<Self::Batch, DataError> {
        let filled = self.fill(samples, Order { channels_last: self.channels_last, pinnable: true })?;
        let [images, height, width] = [filled.labels.len(), filled.size[0], filled.size[1]].map(|size| size as i64);
        let batch = match self.channels_last {
            true => {
                let pixels = filled.buffer.into_tensor(Kind::Uint8, &[images, height, width, 3])?;
                pixels.f_permute([0, 3, 1, 2])?
            }
            false => filled.buffer.into_tensor(Kind::Uint8, &[images, 3, height, width])?,
        };
        Ok((batch, Tensor::f_from_slice(&filled.labels)?))
    }

    fn prepare(&self, (image, _): &(EncodedImage, i64), draw: u64, epoch: u64) -> Option<Prepared> {
        Some(self.prepared(image, draw, epoch, self.channels_last))
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
        self.collate_from(&mut BatchSamples::new(&mut Listed::from(samples), 0, 0, false))
    }

    fn collate_from(&self, samples: &mut BatchSamples<'_, (EncodedImage, i64)>) -> Result<Self::Batch, DataError> {
        let mut filled = self.pipeline.fill(samples, Order { channels_last: false, pinnable: false })?;
        let bytes = filled.image_bytes() * filled.labels.len();
        let [images, height, width] = [filled.labels.len(), filled.size[0], filled.size[1]];
        let pixels = &filled.buffer.as_mut_slice()[..bytes];
        let batch = self.to_float.planes(pixels, [images, 3, height, width], samples.pinned())?;
        Ok((batch, Tensor::f_from_slice(&filled.labels)?))
    }

    fn prepare(&self, (image, _): &(EncodedImage, i64), draw: u64, epoch: u64) -> Option<Prepared> {
        Some(self.pipeline.prepared(image, draw, epoch, false))
    }
}
