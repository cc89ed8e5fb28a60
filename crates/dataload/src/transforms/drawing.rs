//! How an image is drawn where it is moved, and the options for it.

use crate::{DataError, Interpolation};

#[derive(Clone, Copy, Debug)]
pub(super) struct Drawing {
    pub(super) interpolation: Interpolation,
    /// The colour outside of the image.
    pub(super) fill: [u8; 3],
}

impl Drawing {
    /// With black outside of the image.
    pub(super) fn new(interpolation: Interpolation) -> Self {
        Self { interpolation, fill: [0; 3] }
    }

    /// Refused when it is set, not for those of the images that are moved.
    pub(super) fn interpolated(self, interpolation: Interpolation) -> Result<Self, DataError> {
        match interpolation {
            Interpolation::Bicubic => Err(DataError::option("interpolation", "Nearest or Bilinear", "Bicubic")),
            interpolation => Ok(Self { interpolation, ..self }),
        }
    }
}

/// The options of a transform with a field `drawing`, whose interpolation is the one named unless it is set.
macro_rules! drawing_options {
    ($unless_set:literal) => {
        #[doc = concat!("How pixels are interpolated where the image is moved; ", $unless_set, " unless set.")]
        ///
        /// # Errors
        /// [`DataError::InvalidOption`] for `Bicubic`.
        pub fn interpolation(mut self, interpolation: Interpolation) -> Result<Self, DataError> {
            self.drawing = self.drawing.interpolated(interpolation)?;
            Ok(self)
        }

        /// The colour outside of the image, in red, green and blue; black unless set. A [`Mask`](crate::Mask) has a value
        /// of its own for that.
        pub fn fill(mut self, fill: [u8; 3]) -> Self {
            self.drawing.fill = fill;
            self
        }
    };
}

pub(super) use drawing_options;
