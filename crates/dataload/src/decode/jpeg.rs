//! JPEG, by `overdrive-jpeg`.

use std::path::Path;
use std::sync::Arc;

use overdrive_jpeg::{Error, Jpeg, Scale};

use super::{check_bytes, check_size as check_pixels};
use crate::{Color, DataError, Image, Region};

/// Reads the headers.
pub(crate) fn open<'a>(encoded: &'a [u8], path: &Path) -> Result<Jpeg<'a>, DataError> {
    Jpeg::open(encoded).map_err(|error| refused(error, path))
}

/// Refuses an image that is too large with `channels` channels, or whose coefficients take too much memory.
pub(crate) fn check_size(jpeg: &Jpeg<'_>, channels: usize, path: &Path) -> Result<(), DataError> {
    check_bytes(jpeg.coefficient_bytes(), path)?;
    check_pixels(jpeg.height(), jpeg.width(), channels, path)
}

/// Decodes `region` of the scaled image to pixels of `N` bytes.
pub(crate) fn decode_part<const N: usize>(
    jpeg: &Jpeg<'_>,
    region: &Region,
    scale: Scale,
    pixels: &mut [u8],
    path: &Path,
) -> Result<(), DataError> {
    #[cfg(feature = "libjpeg-turbo")]
    if super::turbo::decode::<N>(jpeg, region, scale, pixels) {
        return Ok(());
    }
    jpeg.decode::<N>(region, scale, pixels).map_err(|error| refused(error, path))
}

fn refused(error: Error, path: &Path) -> DataError {
    match error {
        Error::Damaged { at, found } => DataError::corrupt(path, at as u64, "an intact JPEG image", found),
        Error::Unsupported { at, found } => {
            DataError::corrupt(path, at as u64, "a baseline or progressive JPEG image of 8 bits", found)
        }
        Error::TooShort { width, height, bytes } => {
            DataError::corrupt(path, 0, format!("data for {width} x {height} pixels"), format!("{bytes} bytes"))
        }
        // Of regions and buffers, which are this crate's own.
        error => DataError::other(error),
    }
}

/// Decodes the whole file.
pub(super) fn decode(encoded: &[u8], color: Color, path: &Path) -> Result<Image, DataError> {
    let jpeg = open(encoded, path)?;
    let (height, width) = (jpeg.height(), jpeg.width());
    let whole = Region::whole(height, width);
    let channels = if jpeg.is_grey() && color != Color::Rgb { 1 } else { 3 };
    check_size(&jpeg, channels, path)?;
    let mut pixels: Arc<[u8]> = std::iter::repeat_n(0, channels * height * width).collect();
    // Always succeeds: the new `Arc` has no other owner.
    if let Some(pixels) = Arc::get_mut(&mut pixels) {
        match channels {
            1 => decode_part::<1>(&jpeg, &whole, Scale::Full, pixels, path)?,
            _ => decode_part::<3>(&jpeg, &whole, Scale::Full, pixels, path)?,
        }
    }
    if color == Color::Grey && channels == 3 {
        let (pixels, channels) = color.convert(pixels.to_vec(), channels);
        return Image::new(pixels, height, width, channels);
    }
    Image::new(pixels, height, width, channels)
}
