//! Decodes image files to an [`Image`]. Each format is one module here and one line in [`FORMATS`].

pub(crate) mod jpeg;
mod png;
#[cfg(feature = "libjpeg-turbo")]
mod turbo;
mod webp;

use std::path::Path;

use crate::{Color, DataError, Image};

/// The most bytes that one decoded image may take: 512 MiB, at one byte per channel of a pixel. Both the file's
/// channels and the requested ones must fit: three for RGB, one for grey, and one more with transparency.
pub const MAX_IMAGE_BYTES: u64 = 1 << 29;

/// Refuses an image of more than [`MAX_IMAGE_BYTES`].
pub(crate) fn check_size(height: usize, width: usize, channels: usize, path: &Path) -> Result<(), DataError> {
    check_bytes((height as u64).saturating_mul(width as u64).saturating_mul(channels as u64), path)
}

fn check_bytes(bytes: u64, path: &Path) -> Result<(), DataError> {
    DataError::check_bytes(MAX_IMAGE_BYTES, bytes, "the decoded image", path)
}

type Decoder = fn(&[u8], Color, &Path) -> Result<Image, DataError>;

/// Recognises a format by its first bytes.
type Magic = fn(&[u8]) -> bool;

/// How a format begins, and what decodes it.
const FORMATS: [(Magic, Decoder); 3] = [
    (|encoded| encoded.starts_with(png::MAGIC), png::decode),
    (|encoded| encoded.starts_with(overdrive_jpeg::MAGIC), jpeg::decode),
    (webp::is_webp, webp::decode),
];

/// Decodes a PNG, JPEG or WebP image; the format is recognised by the first bytes, not by the name.
///
/// `path` only names the file in errors. An animated image gives its first frame. 16-bit values keep their high byte,
/// as in Pillow for colours (Pillow clamps 16-bit grey at 255 instead). JPEG pixels equal Pillow's bit for bit; CMYK
/// becomes RGB.
///
/// # Errors
/// [`DataError::UnknownFormat`]; [`DataError::Corrupt`] for a truncated or damaged image; [`DataError::TooLarge`] for
/// an image above [`MAX_IMAGE_BYTES`].
pub fn decode_image(encoded: &[u8], color: Color, path: &Path) -> Result<Image, DataError> {
    match FORMATS.iter().find(|(is_format, _)| is_format(encoded)) {
        Some((_, decode)) => decode(encoded, color, path),
        None if encoded.is_empty() => Err(DataError::corrupt(path, 0, "an image", "an empty file")),
        None => {
            let magic = encoded[..encoded.len().min(8)].to_vec();
            Err(DataError::UnknownFormat { path: path.to_owned(), magic })
        }
    }
}

pub(crate) use png::bit_depth as png_depth;
#[cfg(test)]
pub(crate) use png::tests as png_tests;
