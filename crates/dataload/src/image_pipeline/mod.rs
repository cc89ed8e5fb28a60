//! Decoding and transforms as one collate function.

mod collate;
mod fill;

use std::cell::RefCell;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

pub use collate::{CollateTargets, FloatPipeline};
use overdrive_ffi::BufferPool;

use crate::transforms::Scratch;
use crate::{Canvas, Collate, DataError, Draws, EncodedImage, Image, Target, ToFloat, Transform};

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
/// A sample is a pair of an image and its label of any shape, a [`Target`]: a class, a caption, several of them, boxes,
/// masks, key points. What moves the image's pixels moves those with them:
///
/// ```
/// # use overdrive_dataload::{BoundingBoxFormat, BoundingBoxes, Collate, DataError, EncodedImage, PerBox};
/// # use overdrive_dataload::{ImagePipeline, RandomHorizontalFlip, Resize, SanitizeBoundingBoxes};
/// # let jpeg = include_bytes!("../../../../testing/images/h2v2.jpg").as_slice();
/// let boxes = BoundingBoxes::new([[4.0, 8.0, 20.0, 10.0], [30.0, 5.0, 8.0, 9.0]], BoundingBoxFormat::Xywh);
/// let sample = (EncodedImage::new(jpeg, "some.jpg"), (boxes, PerBox(vec![17_i64, 3]), "two cats".to_owned()));
///
/// let train = ImagePipeline::new(0)
///     .then(RandomHorizontalFlip::default())
///     .then(Resize::new([320, 320]))
///     .then(SanitizeBoundingBoxes::new());
/// let (images, (boxes, classes, captions)) = train.collate(vec![sample.clone(), sample])?; // as a loader does
///
/// let (boxes, counts) = boxes.to_padded(0.0, None)?; // [2, most boxes, 4] and [2]
/// assert_eq!((images.size(), boxes.size()), (vec![2, 3, 320, 320], vec![2, 2, 4]));
/// # assert_eq!((counts.size(), classes.rows(), captions.len()), (vec![2], 2, 2));
/// # Ok::<(), DataError>(())
/// ```
///
/// # Shapes
/// `N` samples `(EncodedImage, L)` give uint8 `[N, 3, H, W]`, and their labels as [`Stack`](crate::Stack) puts them into
/// a batch: int64 `[N]` for `i64`. The first good image of a batch sets `H` and `W`, and images of another size are bad
/// samples: end with a transform that makes all of one size.
///
/// # Source
/// `torchvision.transforms.v2.Compose` after the loader of `torchvision.datasets.ImageFolder`.
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

    /// Whether a JPEG image is rotated and flipped by its EXIF orientation; off unless set, as in torchvision. Boxes,
    /// masks and key points are those of the image as it is then.
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
        FloatPipeline::new(self, to_float)
    }

    /// Puts the labels of a batch together by `collate` instead of [`Stack`](crate::Stack), for padding, or for types
    /// of your own that implement [`Target`] alone.
    ///
    /// ```
    /// use overdrive_dataload::{BoundingBoxes, ImagePipeline, PerBox, Resize, Stackable};
    ///
    /// type Label = (BoundingBoxes, PerBox<i64>);
    ///
    /// let detect = ImagePipeline::new(0).then(Resize::new(512)).collate_targets(|labels: Vec<Label>| {
    ///     let (boxes, classes) = Stackable::stack(labels)?;
    ///     Ok((boxes.to_padded(0.0, Some(100))?, classes.to_padded(-1.0, Some(100))?))
    /// });
    /// ```
    pub fn collate_targets<L: Target, C: Collate<L>>(self, collate: C) -> CollateTargets<Self, C> {
        CollateTargets::new(self, collate)
    }

    /// Decodes and transforms a sample into `slot`, its `3 * H * W` bytes of the batch; `draw` is its
    /// [`Drawn::draw`](crate::Drawn::draw).
    ///
    /// # Errors
    /// [`DataError::ImageShape`] when the result has another number of bytes; an error of the decoder or a transform.
    pub fn decode_into(&self, sample: &EncodedImage, draw: u64, epoch: u64, slot: &mut [u8]) -> Result<(), DataError> {
        SCRATCH.with_borrow_mut(|scratch| {
            let mut none = ();
            let canvas = self.canvas(sample, &mut none, [draw, epoch], scratch)?;
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
        self.image_with(image, &mut (), draw, epoch)
    }

    /// The same with the image's target, which changes with it.
    ///
    /// # Errors
    /// An error of a transform, some of which refuse some targets: then those before it have changed the target.
    /// [`DataError::InvalidOption`] for a mask of another size than the image.
    pub fn image_with(
        &self,
        image: &Image,
        target: &mut dyn Target,
        draw: u64,
        epoch: u64,
    ) -> Result<Image, DataError> {
        SCRATCH.with_borrow_mut(|scratch| {
            let mut canvas = Canvas::of_image(image, Path::new("image"), scratch)?.with_target(target)?;
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

    /// The transformed image; its target is transformed too.
    fn canvas<'a>(
        &self,
        sample: &'a EncodedImage,
        target: &'a mut dyn Target,
        [draw, epoch]: [u64; 2],
        scratch: &'a mut Scratch,
    ) -> Result<Canvas<'a>, DataError> {
        let canvas = Canvas::open(&sample.bytes, self.upright, &sample.path, scratch)?;
        let mut canvas = canvas.with_target(target)?;
        canvas.dct_scaling(self.dct_scaling);
        self.transform(&mut canvas, draw, epoch)?;
        Ok(canvas)
    }
}

impl fmt::Debug for ImagePipeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ImagePipeline {{ transforms: {}, seed: {} }}", self.transforms.len(), self.seed)
    }
}
