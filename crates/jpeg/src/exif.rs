//! The EXIF orientation: how the camera was held.

use crate::header::marker;

/// The EXIF orientation of a JPEG file, 1 (upright) to 8; 1 where the file has none that can be read.
///
/// # Source
/// EXIF 2.32, tag 0x0112; `PIL.ImageOps.exif_transpose`.
pub fn orientation(encoded: &[u8]) -> u8 {
    tiff(encoded).and_then(tag).filter(|value| (1..=8).contains(value)).unwrap_or(1)
}

/// The content of the EXIF segment.
fn tiff(encoded: &[u8]) -> Option<&[u8]> {
    let mut at = 2;
    loop {
        at = marker(encoded, at)?;
        let &[_, marker, high, low] = encoded.get(at..)?.first_chunk()?;
        let length = usize::from(u16::from_be_bytes([high, low]));
        let body = encoded.get(at + 4..at + 2 + length)?;
        match (marker, body.strip_prefix(b"Exif\0\0")) {
            (0xe1, Some(tiff)) => return Some(tiff),
            (0xda, _) => return None,
            _ => at += 2 + length,
        }
    }
}

fn tag(tiff: &[u8]) -> Option<u8> {
    let little = tiff.starts_with(b"II");
    let short = |at: usize| {
        let bytes: [u8; 2] = tiff.get(at..at.checked_add(2)?)?.try_into().ok()?;
        Some(if little { u16::from_le_bytes(bytes) } else { u16::from_be_bytes(bytes) })
    };
    let (first, second) = (usize::from(short(4)?), usize::from(short(6)?));
    let start = if little { first | second << 16 } else { first << 16 | second };
    let entries = usize::from(short(start)?);
    let entry = (0..entries).map(|i| start + 2 + 12 * i).find(|&at| short(at) == Some(0x0112))?;
    u8::try_from(short(entry + 8)?).ok()
}
