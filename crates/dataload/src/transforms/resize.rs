//! A fixed size.

use crate::{Canvas, DataError, Draws, Interpolation, Size, Transform};

/// Scales the shorter side to a length, or both sides to a size.
///
/// # Source
/// `torchvision.transforms.Resize`.
#[derive(Clone, Copy, Debug)]
pub struct Resize {
    to: To,
    interpolation: Interpolation,
    antialias: bool,
}

#[derive(Clone, Copy, Debug)]
enum To {
    Shorter(usize),
    Both(Size),
}

impl Resize {
    /// Scales so that the shorter side has this length and the ratio of the sides stays.
    pub fn shorter(side: usize) -> Self {
        Self { to: To::Shorter(side), interpolation: Interpolation::default(), antialias: true }
    }

    /// Scales to `[height, width]`, or to a square.
    pub fn new(size: impl Into<Size>) -> Self {
        Self { to: To::Both(size.into()), interpolation: Interpolation::default(), antialias: true }
    }

    /// Bilinear unless set.
    pub fn interpolation(mut self, interpolation: Interpolation) -> Self {
        self.interpolation = interpolation;
        self
    }

    /// Whether every pixel of an image that shrinks has a share; on unless set.
    pub fn antialias(mut self, antialias: bool) -> Self {
        self.antialias = antialias;
        self
    }
}

impl Transform for Resize {
    fn apply(&self, canvas: &mut Canvas<'_>, _: &mut Draws) -> Result<(), DataError> {
        let (height, width) = (canvas.height(), canvas.width());
        // As Python has it: the product first, then the quotient cut to a whole number.
        let longer =
            |side: usize, long: usize, short: usize| (side.saturating_mul(long) as f64 / short as f64) as usize;
        let size = match self.to {
            To::Both(size) => size,
            To::Shorter(side) if height <= width => Size { height: side, width: longer(side, width, height) },
            To::Shorter(side) => Size { height: longer(side, height, width), width: side },
        };
        canvas.resize(size, self.interpolation, self.antialias)
    }
}
