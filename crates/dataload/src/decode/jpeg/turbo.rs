//! The system's libjpeg-turbo in place of this crate's decoder, with the feature `libjpeg-turbo`.

use overdrive_ffi::jpeg::{Part, decode as decode_part};

use super::header::Model;
use super::{Jpeg, scan};
use crate::Region;

/// Decodes what [`Jpeg::decode`] does, or tells that the own decoder is to: for what libjpeg-turbo does not turn into
/// RGB, for files with restart markers, in which the own one can skip, and for every file with something wrong. So the
/// feature changes neither pixels nor errors.
pub(super) fn decode<const N: usize>(jpeg: &Jpeg<'_>, region: &Region, eighths: usize, pixels: &mut [u8]) -> bool {
    let markers = &jpeg.markers;
    if N == 1 || matches!(markers.frame.model, Model::Cmyk | Model::Ycck) || markers.restart_interval > 0 {
        return false;
    }
    // Libjpeg-turbo has tables for files without, and does not look at what follows the region's last row.
    let complete = jpeg.scan.members.iter().all(|member| scan::tables(markers, member).is_ok());
    let ends = memchr::memmem::rfind(&markers.file[markers.at..], b"\xff\xd9").is_some();
    if jpeg.is_one_scan() && !complete || !ends {
        return false;
    }
    let &Region { top, left, height, width } = region;
    let part = Part { top, left, height, width, eighths, channels: N };
    decode_part(markers.file, &part, pixels).is_ok()
}
