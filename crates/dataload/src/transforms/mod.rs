//! Transforms with torchvision's names, parameters and meaning, on uint8 images.

mod affine;
mod aug_mix;
mod boxes;
mod canvas;
mod center_crop;
mod color_jitter;
mod drawing;
mod draws;
mod flip;
mod gaussian_blur;
mod mix;
mod operation;
mod padding;
mod rand_augment;
mod random_affine;
mod random_crop;
mod random_erasing;
mod random_resized_crop;
mod resize;
mod sanitize;

pub(crate) use affine::{Inverse, nearest};
pub use aug_mix::AugMix;
pub use boxes::{ClampBoundingBoxes, ClampKeyPoints, ConvertBoundingBoxFormat};
pub(crate) use canvas::Scratch;
pub use canvas::{Canvas, Interpolation};
pub use center_crop::CenterCrop;
pub use color_jitter::ColorJitter;
pub use draws::Draws;
pub use flip::{RandomHorizontalFlip, RandomVerticalFlip};
pub use gaussian_blur::GaussianBlur;
pub use mix::{CutMix, MixUp};
pub use operation::Operation;
pub use padding::{Padding, PaddingMode};
pub use rand_augment::{RandAugment, TrivialAugmentWide};
pub use random_affine::{RandomAffine, RandomRotation};
pub use random_crop::RandomCrop;
pub use random_erasing::{ErasingValue, RandomErasing};
pub use random_resized_crop::RandomResizedCrop;
pub use resize::Resize;
pub use sanitize::{SanitizeBoundingBoxes, SanitizeKeyPoints};

use crate::DataError;

/// One step from a decoded image to the batch.
///
/// All randomness must come from `draws`, so that the result is a function of (seed, epoch, draw).
pub trait Transform: Send + Sync {
    /// Changes `canvas`.
    ///
    /// # Errors
    /// When the image cannot be changed this way; errors of the decoder too, since decoding is deferred.
    fn apply(&self, canvas: &mut Canvas<'_>, draws: &mut Draws) -> Result<(), DataError>;
}

/// The height and width of an image; a single number makes a square.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Rows.
    pub height: usize,
    /// Columns.
    pub width: usize,
}

impl From<usize> for Size {
    fn from(side: usize) -> Self {
        Self { height: side, width: side }
    }
}

impl From<[usize; 2]> for Size {
    /// Torchvision's order: `[height, width]`.
    fn from([height, width]: [usize; 2]) -> Self {
        Self { height, width }
    }
}
