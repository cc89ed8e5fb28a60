//! Random flips.

use crate::{Canvas, DataError, Draws, Transform};

/// Flips left and right with probability `p`.
///
/// # Source
/// `torchvision.transforms.RandomHorizontalFlip`.
#[derive(Clone, Copy, Debug)]
pub struct RandomHorizontalFlip {
    p: f64,
}

/// Flips top and bottom with probability `p`.
///
/// # Source
/// `torchvision.transforms.RandomVerticalFlip`.
#[derive(Clone, Copy, Debug)]
pub struct RandomVerticalFlip {
    p: f64,
}

impl RandomHorizontalFlip {
    /// `p` from 0 to 1.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a `p` outside 0 to 1.
    pub fn new(p: f64) -> Result<Self, DataError> {
        Ok(Self { p: probability(p)? })
    }
}

impl RandomVerticalFlip {
    /// `p` from 0 to 1.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a `p` outside 0 to 1.
    pub fn new(p: f64) -> Result<Self, DataError> {
        Ok(Self { p: probability(p)? })
    }
}

impl Default for RandomHorizontalFlip {
    /// `p` is 0.5.
    fn default() -> Self {
        Self { p: 0.5 }
    }
}

impl Default for RandomVerticalFlip {
    /// `p` is 0.5.
    fn default() -> Self {
        Self { p: 0.5 }
    }
}

impl Transform for RandomHorizontalFlip {
    fn apply(&self, canvas: &mut Canvas<'_>, draws: &mut Draws) -> Result<(), DataError> {
        if draws.chance(self.p) {
            canvas.hflip();
        }
        Ok(())
    }
}

impl Transform for RandomVerticalFlip {
    fn apply(&self, canvas: &mut Canvas<'_>, draws: &mut Draws) -> Result<(), DataError> {
        if draws.chance(self.p) {
            canvas.vflip();
        }
        Ok(())
    }
}

pub(super) fn probability(p: f64) -> Result<f64, DataError> {
    if !(0.0..=1.0).contains(&p) {
        return Err(DataError::option("p", "a probability from 0 to 1", p));
    }
    Ok(p)
}
