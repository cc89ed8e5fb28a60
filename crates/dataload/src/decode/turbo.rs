//! Decodes with the system's libjpeg-turbo instead of `overdrive-jpeg` (feature `libjpeg-turbo`).

use overdrive_ffi::jpeg::{Part, decode as decode_part};
use overdrive_jpeg::{Jpeg, Scale};

use crate::Region;

/// As [`Jpeg::decode`]; false when `overdrive-jpeg` has to do it: for grey output, for files that do not
/// [suit](Jpeg::suits_libjpeg), and for every damaged file. So the feature changes neither pixels nor errors.
pub(super) fn decode<const N: usize>(jpeg: &Jpeg<'_>, region: &Region, scale: Scale, pixels: &mut [u8]) -> bool {
    if N == 1 || !jpeg.suits_libjpeg() {
        return false;
    }
    let &Region { top, left, height, width } = region;
    let part = Part { top, left, height, width, eighths: scale.eighths(), channels: N };
    decode_part(jpeg.file(), &part, pixels).is_ok()
}
