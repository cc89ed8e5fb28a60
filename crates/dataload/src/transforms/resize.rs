//! Resizing.

use crate::{Canvas, DataError, Draws, Interpolation, Size, Transform};

/// Resizes the shorter side to a length, or both sides to a size.
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
    /// Resizes so that the shorter side has this length, keeping the aspect ratio.
    pub fn shorter(side: usize) -> Self {
        Self { to: To::Shorter(side), interpolation: Interpolation::default(), antialias: true }
    }

    /// Resizes to `[height, width]`, or to a square.
    pub fn new(size: impl Into<Size>) -> Self {
        Self { to: To::Both(size.into()), interpolation: Interpolation::default(), antialias: true }
    }

    /// The interpolation; bilinear unless set.
    pub fn interpolation(mut self, interpolation: Interpolation) -> Self {
        self.interpolation = interpolation;
        self
    }

    /// Whether downscaling is antialiased, so that every pixel contributes; on unless set.
    pub fn antialias(mut self, antialias: bool) -> Self {
        self.antialias = antialias;
        self
    }
}

impl Transform for Resize {
    fn apply(&self, canvas: &mut Canvas<'_>, _: &mut Draws) -> Result<(), DataError> {
        let (height, width) = (canvas.height(), canvas.width());
        // As in torchvision's Python: the product first, then the truncated quotient.
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
