//! Center crops.

use crate::{Canvas, DataError, Draws, Padding, PaddingMode, Region, Size, Transform};

/// Keeps the middle of an image; a side that is too short is padded with black.
///
/// # Source
/// `torchvision.transforms.CenterCrop`.
#[derive(Clone, Copy, Debug)]
pub struct CenterCrop {
    size: Size,
}

impl CenterCrop {
    /// A crop of this size: one side of a square, or `[height, width]`.
    pub fn new(size: impl Into<Size>) -> Self {
        Self { size: size.into() }
    }
}

impl Transform for CenterCrop {
    fn apply(&self, canvas: &mut Canvas<'_>, _: &mut Draws) -> Result<(), DataError> {
        let Size { height, width } = self.size;
        if height > canvas.height() || width > canvas.width() {
            let missing = |wanted: usize, side: usize| wanted.saturating_sub(side);
            let (rows, columns) = (missing(height, canvas.height()), missing(width, canvas.width()));
            let (top, left) = (rows / 2, columns / 2);
            let padding = Padding { left, top, right: columns - left, bottom: rows - top };
            padding.apply(canvas, PaddingMode::Constant, [0; 3])?;
        }
        let middle = |side: usize, wanted: usize| ((side - wanted) as f64 / 2.0).round_ties_even() as usize;
        let (top, left) = (middle(canvas.height(), height), middle(canvas.width(), width));
        canvas.crop(Region { top, left, height, width })
    }
}
