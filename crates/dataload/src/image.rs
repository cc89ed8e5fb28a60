//! A decoded image, shared rather than copied.

use std::fmt;
use std::sync::Arc;

use crate::DataError;

/// A decoded image of unsigned bytes; clones share the bytes.
///
/// # Shapes
/// `[height, width, channels]`, row-major: the order in which decoders write and transforms read. Collating turns a
/// batch into `[N, channels, height, width]`.
#[derive(Clone, PartialEq, Eq)]
pub struct Image {
    data: Arc<[u8]>,
    height: usize,
    width: usize,
    channels: usize,
}

impl Image {
    /// An image from `height * width * channels` bytes.
    ///
    /// # Errors
    /// [`DataError::ImageShape`] when `data` has another length.
    pub fn new(data: impl Into<Arc<[u8]>>, height: usize, width: usize, channels: usize) -> Result<Self, DataError> {
        let data = data.into();
        let bytes = height.checked_mul(width).and_then(|pixels| pixels.checked_mul(channels));
        if bytes != Some(data.len()) {
            return Err(DataError::ImageShape { height, width, channels, bytes: data.len() });
        }
        Ok(Self { data, height, width, channels })
    }

    /// The bytes, row by row, the channels of a pixel side by side.
    pub fn data(&self) -> &[u8] {
        &self.data
    }

    /// Rows.
    pub fn height(&self) -> usize {
        self.height
    }

    /// Columns.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Values per pixel: 1 grey, 2 grey and alpha, 3 RGB, 4 RGB and alpha.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// The image's shape in a batch: `[channels, height, width]`.
    pub fn chw(&self) -> [usize; 3] {
        [self.channels, self.height, self.width]
    }
}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Image {{ height: {}, width: {}, channels: {} }}", self.height, self.width, self.channels)
    }
}

/// The channels of a decoded image.
///
/// # Source
/// `torchvision.io.ImageReadMode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[doc(alias = "ImageReadMode")]
pub enum Color {
    /// Those of the file: 1 for grey, 3 for RGB and palettes, one more with transparency.
    #[default]
    #[doc(alias = "UNCHANGED")]
    AsStored,
    /// Always 1; colours are weighted as Pillow's `convert("L")` does (ITU-R 601-2), transparency is dropped.
    #[doc(alias = "GRAY")]
    Grey,
    /// Always 3, as torchvision's `ImageFolder` gives it; transparency is dropped.
    #[doc(alias = "RGB")]
    Rgb,
}

impl Color {
    /// The channels of the decoded image when the file has `stored`.
    pub(crate) fn channels(self, stored: usize) -> usize {
        match self {
            Self::AsStored => stored,
            Self::Grey => 1,
            Self::Rgb => 3,
        }
    }

    /// Converts interleaved pixels; returns them with their new number of channels.
    pub(crate) fn convert(self, pixels: Vec<u8>, channels: usize) -> (Vec<u8>, usize) {
        let each = |to: fn(&[u8]) -> u8| pixels.chunks_exact(channels).map(to).collect();
        match (self, channels) {
            (Self::AsStored, _) | (Self::Grey, 1) | (Self::Rgb, 3) => (pixels, channels),
            (Self::Grey, 2) => (each(|pixel| pixel[0]), 1),
            (Self::Grey, _) => (each(luma), 1),
            (Self::Rgb, 1 | 2) => (pixels.chunks_exact(channels).flat_map(|pixel| [pixel[0]; 3]).collect(), 3),
            (Self::Rgb, _) => {
                (pixels.chunks_exact(channels).flat_map(|pixel| [pixel[0], pixel[1], pixel[2]]).collect(), 3)
            }
        }
    }
}

/// Pillow's fixed-point form of 0.299 R + 0.587 G + 0.114 B, so that results are equal to the last bit.
fn luma(pixel: &[u8]) -> u8 {
    let [red, green, blue] = [pixel[0], pixel[1], pixel[2]].map(u32::from);
    ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn length_must_fill_the_shape() {
        assert_eq!(Image::new([1, 2, 3, 4, 5, 6], 2, 1, 3).unwrap().chw(), [3, 2, 1]);
        assert!(matches!(Image::new([1, 2], 1, 1, 1), Err(DataError::ImageShape { bytes: 2, .. })));
        assert!(Image::new([], usize::MAX, 2, 1).is_err());
    }

    #[test]
    fn colours_convert() {
        let rgba = vec![255, 0, 0, 9, 10, 20, 30, 9];
        assert_eq!(Color::Rgb.convert(rgba.clone(), 4), (vec![255, 0, 0, 10, 20, 30], 3));
        assert_eq!(Color::Grey.convert(rgba.clone(), 4), (vec![76, 18], 1));
        assert_eq!(Color::AsStored.convert(rgba.clone(), 4), (rgba, 4));
        assert_eq!(Color::Rgb.convert(vec![7, 1, 8, 1], 2), (vec![7, 7, 7, 8, 8, 8], 3));
        assert_eq!(Color::Grey.convert(vec![255, 255, 255], 3), (vec![255], 1));
    }
}
