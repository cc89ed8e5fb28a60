//! Decodes with the system's libjpeg-turbo instead of this crate's decoder (feature `libjpeg-turbo`).

use overdrive_ffi::jpeg::{Part, decode as decode_part};

use super::header::Model;
use super::{Jpeg, scan};
use crate::Region;

/// As [`Jpeg::decode`]; false when this crate's decoder has to do it: for grey output and CMYK files, which
/// libjpeg-turbo does not turn into RGB, for files with restart markers, where this crate's decoder can skip, and for
/// every damaged file. So the feature changes neither pixels nor errors.
pub(super) fn decode<const N: usize>(jpeg: &Jpeg<'_>, region: &Region, eighths: usize, pixels: &mut [u8]) -> bool {
    let markers = &jpeg.markers;
    if N == 1 || matches!(markers.frame.model, Model::Cmyk | Model::Ycck) || markers.restart_interval > 0 {
        return false;
    }
    // libjpeg-turbo substitutes default tables where a file has none, and does not look past the region's last row, so
    // both are checked here.
    let complete = jpeg.scan.members.iter().all(|member| scan::tables(markers, member).is_ok());
    let ends = memchr::memmem::rfind(&markers.file[markers.at..], b"\xff\xd9").is_some();
    if jpeg.is_one_scan() && !complete || !ends {
        return false;
    }
    let &Region { top, left, height, width } = region;
    let part = Part { top, left, height, width, eighths, channels: N };
    decode_part(markers.file, &part, pixels).is_ok()
}
