//! Random crops of a fixed size.

use crate::{Canvas, DataError, Draws, Padding, PaddingMode, Region, Size, Transform};

/// Crops a region of a fixed size at a random place, after a border was added where that is set.
///
/// Without a border, only the region is decoded.
///
/// ```
/// use overdrive_dataload::{ImagePipeline, RandomCrop, RandomHorizontalFlip};
///
/// // As for CIFAR-10.
/// let train = ImagePipeline::new(0).then(RandomCrop::new(32).padding(4)).then(RandomHorizontalFlip::default());
/// ```
///
/// # Source
/// `torchvision.transforms.RandomCrop`.
#[derive(Clone, Copy, Debug)]
pub struct RandomCrop {
    size: Size,
    padding: Padding,
    pad_if_needed: bool,
    fill: [u8; 3],
    padding_mode: PaddingMode,
}

impl RandomCrop {
    /// Crops of this size: one side of a square, or `[height, width]`.
    pub fn new(size: impl Into<Size>) -> Self {
        Self {
            size: size.into(),
            padding: Padding::default(),
            pad_if_needed: false,
            fill: [0; 3],
            padding_mode: PaddingMode::default(),
        }
    }

    /// The border: one number for every side, `[left and right, top and bottom]`, or `[left, top, right, bottom]`; none
    /// unless set.
    pub fn padding(mut self, padding: impl Into<Padding>) -> Self {
        self.padding = padding.into();
        self
    }

    /// Whether an image that is still too small gets a border on both sides, of as many pixels as it lacks; off unless
    /// set, and such an image is an error.
    pub fn pad_if_needed(mut self, pad_if_needed: bool) -> Self {
        self.pad_if_needed = pad_if_needed;
        self
    }

    /// The colour of a constant border, in red, green and blue; black unless set.
    pub fn fill(mut self, fill: [u8; 3]) -> Self {
        self.fill = fill;
        self
    }

    /// What the border shows; one colour unless set.
    pub fn padding_mode(mut self, padding_mode: PaddingMode) -> Self {
        self.padding_mode = padding_mode;
        self
    }

    /// The region to crop from an image of this size, its border included.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] when the image is smaller than the crop.
    #[doc(alias = "get_params")]
    pub fn region(&self, height: usize, width: usize, draws: &mut Draws) -> Result<Region, DataError> {
        let Size { height: rows, width: columns } = self.size;
        if rows > height || columns > width {
            let expected = format!("at most the image's {height} x {width} pixels, or `pad_if_needed`");
            return Err(DataError::option("size", expected, format!("{rows} x {columns}")));
        }
        let (top, left) = (draws.below(height - rows + 1), draws.below(width - columns + 1));
        Ok(Region { top, left, height: rows, width: columns })
    }

    fn pad(&self, canvas: &mut Canvas<'_>, padding: Padding) -> Result<(), DataError> {
        if padding == Padding::default() {
            return Ok(());
        }
        padding.apply(canvas, self.padding_mode, self.fill)
    }
}

impl Transform for RandomCrop {
    fn apply(&self, canvas: &mut Canvas<'_>, draws: &mut Draws) -> Result<(), DataError> {
        self.pad(canvas, self.padding)?;
        if self.pad_if_needed {
            let columns = self.size.width.saturating_sub(canvas.width());
            let rows = self.size.height.saturating_sub(canvas.height());
            self.pad(canvas, [columns, rows].into())?;
        }
        let region = self.region(canvas.height(), canvas.width(), draws)?;
        canvas.crop(region)
    }
}
