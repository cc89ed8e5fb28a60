//! Progressive, CMYK and unusually sampled files, through the `zune-jpeg` crate.

use std::path::Path;

use zune_jpeg::JpegDecoder;
use zune_jpeg::errors::DecodeErrors;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

use super::check_size;
use crate::{Color, DataError, Image};

/// The most rows or columns that a JPEG can have.
const MOST: usize = u16::MAX as usize;

pub(super) fn decode(encoded: &[u8], color: Color, path: &Path) -> Result<Image, DataError> {
    let damaged = |error: DecodeErrors| DataError::corrupt(path, 0, "an intact JPEG image", format!("{error:?}"));
    if !encoded.windows(2).rev().any(|pair| pair == b"\xff\xd9") {
        return Err(DataError::corrupt(path, encoded.len() as u64, "more JPEG data", "the end of the file"));
    }
    let options = DecoderOptions::default().set_strict_mode(true).set_max_width(MOST).set_max_height(MOST);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(encoded), options);
    decoder.decode_headers().map_err(damaged)?;
    let (width, height) = decoder.dimensions().unwrap_or_default();
    check_size(height, width, encoded, path)?;
    let channels = match decoder.input_colorspace() {
        Some(ColorSpace::Luma) => 1,
        _ => 3,
    };
    let wanted = if channels == 1 { ColorSpace::Luma } else { ColorSpace::RGB };
    decoder.set_options(options.jpeg_set_out_colorspace(wanted));
    let pixels = decoder.decode().map_err(damaged)?;
    let (pixels, channels) = color.convert(pixels, channels);
    Image::new(pixels, height, width, channels)
}
