//! Parts of JPEG files, decoded by the system's libjpeg-turbo; with the feature `libjpeg-turbo` alone.

use crate::error::{Error, check};
use crate::raw;

/// Which pixels of a file to decode: a region of the image as it is when scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The first row.
    pub top: usize,
    /// The first column.
    pub left: usize,
    /// Rows.
    pub height: usize,
    /// Columns.
    pub width: usize,
    /// The image's scale: 8, 4, 2 or 1 eighths. Sides are rounded up.
    pub eighths: usize,
    /// Bytes a pixel: 3 for red, green and blue, 4 for these and a byte without meaning.
    pub channels: usize,
}

/// Decodes a part of `file` into `pixels`, with the settings that Pillow and torchvision have: the accurate integer transform
/// and smooth upsampling. What a progressive file leaves out is not guessed at.
///
/// Only what the part needs is transformed and coloured. What follows its last row is not looked at, save in a file of
/// several scans.
///
/// # Shapes
/// `pixels` holds `[height, width, channels]`.
///
/// # Errors
/// A file of a kind that libjpeg-turbo cannot turn into RGB (CMYK), a damaged or truncated one, more than 256 scans; a
/// part that is empty or reaches beyond the image, a scale or length other than those above.
///
/// # Source
/// `jpeg_crop_scanline` and `jpeg_skip_scanlines` of libjpeg-turbo 1.5.
pub fn decode(file: &[u8], part: &Part, pixels: &mut [u8]) -> Result<(), Error> {
    let Part { top, left, height, width, eighths, channels } = *part;
    // A JPEG file has at most 65,535 rows and columns; the C side adds two of these numbers.
    let small = [top, left, height, width].iter().all(|&side| side <= usize::from(u16::MAX));
    if !small || height == 0 || width == 0 || !matches!(eighths, 1 | 2 | 4 | 8) || !matches!(channels, 3 | 4) {
        return Err(Error::refused(format!("{part:?} is no part of a JPEG file")));
    }
    let [top, left, height, width, eighths, channels] =
        [top, left, height, width, eighths, channels].map(|value| value as u32);
    let bytes = u64::from(height) * u64::from(width) * u64::from(channels);
    if bytes != pixels.len() as u64 {
        return Err(Error::refused(format!("{part:?} takes {bytes} bytes, not {}", pixels.len())));
    }
    let raw_part = raw::JpegPart { top, left, height, width, eighths, channels };
    // SAFETY: file and part live through the call, and `pixels` has room for the part, as compared above.
    check(|err| unsafe { raw::od_jpeg_decode(file.as_ptr(), file.len(), &raw_part, pixels.as_mut_ptr(), err) })
}
