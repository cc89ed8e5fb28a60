//! Decodes parts of JPEG files with the system's libjpeg-turbo; only with the feature `libjpeg-turbo`.

use crate::error::{Error, check};
use crate::raw;

/// Which pixels of a file to decode: a region of the scaled image.
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
    /// Bytes per pixel: 3 for red, green and blue, 4 for these and a padding byte.
    pub channels: usize,
}

/// Decodes a part of `file` into `pixels`, with the settings of Pillow and torchvision: the accurate integer transform
/// and smooth upsampling. Without block smoothing, which would guess data missing from a progressive file.
///
/// Only the blocks that the part needs are transformed and converted to RGB. Data after its last row is not read,
/// except in a file with several scans.
///
/// # Shapes
/// `pixels` holds `[height, width, channels]`.
///
/// # Errors
/// For a file that libjpeg-turbo cannot convert to RGB (CMYK), that is damaged or truncated, or has more than 256
/// scans; for a part that is empty or reaches beyond the image, or another scale or length than those above.
///
/// # Source
/// `jpeg_crop_scanline` and `jpeg_skip_scanlines` of libjpeg-turbo 1.5.
pub fn decode(file: &[u8], part: &Part, pixels: &mut [u8]) -> Result<(), Error> {
    let Part { top, left, height, width, eighths, channels } = *part;
    // A JPEG file has at most 65,535 rows and columns; the C side adds two of these numbers.
    let small = [top, left, height, width].iter().all(|&side| side <= usize::from(u16::MAX));
    if !small || height == 0 || width == 0 || !matches!(eighths, 1 | 2 | 4 | 8) || !matches!(channels, 3 | 4) {
        return Err(Error::refused(format!(
            "{part:?} is not a part of a JPEG file: height and width should be 1 to 65535, top and left at most 65535, \
             eighths 1, 2, 4 or 8, channels 3 or 4"
        )));
    }
    let [top, left, height, width, eighths, channels] =
        [top, left, height, width, eighths, channels].map(|value| value as u32);
    let bytes = u64::from(height) * u64::from(width) * u64::from(channels);
    if bytes != pixels.len() as u64 {
        return Err(Error::refused(format!("{part:?} needs {bytes} bytes, but was given {}", pixels.len())));
    }
    let raw_part = raw::JpegPart { top, left, height, width, eighths, channels };
    // SAFETY: file and part live through the call, and `pixels` has room for the part, as compared above.
    check(|err| unsafe { raw::od_jpeg_decode(file.as_ptr(), file.len(), &raw_part, pixels.as_mut_ptr(), err) })
}
