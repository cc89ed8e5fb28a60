//! The fuzzer's entry point, which takes any bytes and returns how often something could be decoded from them.
//!
//! The target of cargo-fuzz calls it, and so does the test that replays the corpus, `tests/decoder/corpus.rs`.
#![forbid(unsafe_code)]

use overdrive_jpeg::{Jpeg, Region, Scale, orientation};

/// Images that need more memory are left out, because they only take time.
const MOST_BYTES: u64 = 1 << 26;

/// Decodes the whole image and a part of it at every scale.
///
/// # Panics
/// When the decoder panics, and when a whole image can be decoded and its part cannot, or has other pixels.
pub fn jpeg(bytes: &[u8]) -> usize {
    _ = orientation(bytes);
    let Ok(jpeg) = Jpeg::open(bytes) else { return 0 };
    if 4 * (jpeg.height() * jpeg.width()) as u64 + jpeg.coefficient_bytes() > MOST_BYTES {
        return 0;
    }
    let scales = [Scale::Full, Scale::Half, Scale::Quarter, Scale::Eighth];
    scales.into_iter().map(|scale| whole_and_part(&jpeg, scale, bytes.len())).sum()
}

fn whole_and_part(jpeg: &Jpeg<'_>, scale: Scale, draw: usize) -> usize {
    let (height, width) = (scale.side(jpeg.height()), scale.side(jpeg.width()));
    // Any part, the same for the same file.
    let span = |side: usize, draw: usize| (draw % side, 1 + draw / side % (side - draw % side));
    let ((top, rows), (left, columns)) = (span(height, draw), span(width, draw / 7));
    let part = Region { top, left, height: rows, width: columns };
    let mut some = vec![0; 4 * rows * columns];
    let partly = jpeg.decode::<4>(&part, scale, &mut some);
    let mut all = vec![0; 4 * height * width];
    if jpeg.decode::<4>(&Region::whole(height, width), scale, &mut all).is_err() {
        return usize::from(partly.is_ok());
    }
    let rows = all.chunks_exact(4 * width).skip(top).take(rows);
    let expected: Vec<u8> = rows.flat_map(|row| &row[4 * left..][..4 * columns]).copied().collect();
    assert_eq!(partly, Ok(()), "{part:?} of a whole image at {scale:?}");
    assert!(some == expected, "{part:?} at {scale:?}");
    2
}
