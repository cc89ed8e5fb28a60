//! WebP, through the `image-webp` crate.

use std::io::Cursor;
use std::path::Path;

use image_webp::{DecodingError, WebPDecoder};

use super::{MAX_IMAGE_BYTES, check_size};
use crate::{Color, DataError, Image};

/// `RIFF`, a size, then `WEBP`.
pub(super) fn is_webp(encoded: &[u8]) -> bool {
    encoded.starts_with(b"RIFF") && encoded.get(8..12) == Some(b"WEBP")
}

/// Decodes the file; of an animation, the first frame.
pub(super) fn decode(encoded: &[u8], color: Color, path: &Path) -> Result<Image, DataError> {
    let damaged = |error: DecodingError| DataError::corrupt(path, 0, "an intact WebP image", error.to_string());
    // The decoder may accept a truncated last chunk, so the declared size is checked here.
    let declared = encoded.get(4..8).and_then(|size| size.try_into().ok()).map_or(0, u32::from_le_bytes);
    if u64::from(declared) + 8 > encoded.len() as u64 {
        return Err(DataError::corrupt(path, encoded.len() as u64, "more WebP data", "the end of the file"));
    }
    let mut decoder = WebPDecoder::new(Cursor::new(encoded)).map_err(damaged)?;
    decoder.set_memory_limit(MAX_IMAGE_BYTES as usize);
    let (width, height) = decoder.dimensions();
    let channels = if decoder.has_alpha() { 4 } else { 3 };
    check_size(height as usize, width as usize, channels.max(color.channels(channels)), path)?;
    let mut pixels = vec![0; width as usize * height as usize * channels];
    decoder.read_image(&mut pixels).map_err(damaged)?;
    let (pixels, channels) = color.convert(pixels, channels);
    Image::new(pixels, height as usize, width as usize, channels)
}
