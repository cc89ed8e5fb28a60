//! The system's libjpeg-turbo in place of this crate's decoder, with the feature `libjpeg-turbo`.

use overdrive_ffi::jpeg::{Part, decode as decode_part};

use super::Jpeg;
use super::header::Model;
use crate::{DataError, Region};

/// Decodes what [`Jpeg::decode`] does; nothing for the kinds of file that libjpeg-turbo does not turn into RGB.
pub(super) fn decode<const N: usize>(
    jpeg: &Jpeg<'_>,
    region: &Region,
    eighths: usize,
    pixels: &mut [u8],
) -> Option<Result<(), DataError>> {
    let (file, at) = (jpeg.markers.file, jpeg.markers.at);
    if N == 1 || matches!(jpeg.markers.frame.model, Model::Cmyk | Model::Ycck) {
        return None;
    }
    // It does not look at what follows the region's last row, a truncated file is to be noticed all the same.
    if memchr::memmem::rfind(&file[at..], b"\xff\xd9").is_none() {
        let error = DataError::corrupt(jpeg.path, file.len() as u64, "more JPEG data", "the end of the file");
        return Some(Err(error));
    }
    let &Region { top, left, height, width } = region;
    let part = Part { top, left, height, width, eighths, channels: N };
    Some(
        decode_part(file, &part, pixels).map_err(|error| {
            DataError::corrupt(jpeg.path, error.offset as u64, "an intact JPEG image", error.to_string())
        }),
    )
}
