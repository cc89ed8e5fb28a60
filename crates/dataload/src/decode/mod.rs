//! From an encoded file to an [`Image`]. A format is one file here and one line in [`FORMATS`].

mod png;

use std::path::Path;

use crate::{Color, DataError, Image};

/// The most bytes that one decoded image may take: 512 MiB.
pub const MAX_IMAGE_BYTES: u64 = 1 << 29;

type Decoder = fn(&[u8], Color, &Path) -> Result<Image, DataError>;

/// The first bytes of a format, and what decodes it.
const FORMATS: [(&[u8], Decoder); 1] = [(png::MAGIC, png::decode)];

/// Decodes an image of any format that this build knows (PNG), told by its first bytes and not by its name.
///
/// `path` only names the file in errors. An animated image gives its first frame; 16-bit values keep their high byte.
///
/// # Errors
/// [`DataError::UnknownFormat`]; [`DataError::Corrupt`] for a truncated or damaged image; [`DataError::TooLarge`] for
/// one above [`MAX_IMAGE_BYTES`].
pub fn decode_image(encoded: &[u8], color: Color, path: &Path) -> Result<Image, DataError> {
    match FORMATS.iter().find(|(magic, _)| encoded.starts_with(magic)) {
        Some((_, decode)) => decode(encoded, color, path),
        None if encoded.is_empty() => Err(DataError::corrupt(path, 0, "an image", "an empty file")),
        None => {
            let magic = encoded[..encoded.len().min(8)].to_vec();
            Err(DataError::UnknownFormat { path: path.to_owned(), magic })
        }
    }
}

#[cfg(test)]
pub(crate) use png::tests as png_tests;
