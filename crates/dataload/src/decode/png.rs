//! PNG, through the `png` crate.

use std::io::{self, Cursor};
use std::path::Path;

use png::{Decoder, DecodingError, Limits, Transformations};

use super::{MAX_IMAGE_BYTES, check_size};
use crate::read::MAX_DEFLATE_RATIO;
use crate::{Color, DataError, Image};

pub(super) const MAGIC: &[u8] = b"\x89PNG\r\n\x1a\n";

/// The bits of a value, as the header of a PNG file states them.
pub(crate) fn bit_depth(encoded: &[u8]) -> Option<u8> {
    encoded.get(24).copied().filter(|_| encoded.starts_with(MAGIC))
}

/// Decodes the whole file: checksums are verified, and a missing end marker is an error.
pub(super) fn decode(encoded: &[u8], color: Color, path: &Path) -> Result<Image, DataError> {
    let damaged = |error| damaged(error, encoded.len(), path);

    let limits = Limits { bytes: MAX_IMAGE_BYTES as usize };
    let mut decoder = Decoder::new_with_limits(Cursor::new(encoded), limits);
    decoder.set_transformations(Transformations::normalize_to_color8());
    decoder.set_ignore_text_chunk(true);
    decoder.set_ignore_iccp_chunk(true);

    let header = decoder.read_header_info().map_err(damaged)?;
    let pixels = u64::from(header.width) * u64::from(header.height);
    let packed_bits = pixels.saturating_mul(header.bits_per_pixel() as u64);
    if packed_bits / 8 > (encoded.len() as u64).saturating_mul(MAX_DEFLATE_RATIO) {
        let expected = format!("data for {} x {} pixels", header.width, header.height);
        return Err(DataError::corrupt(path, MAGIC.len() as u64, expected, format!("{} bytes", encoded.len())));
    }
    let (height, width) = (header.height as usize, header.width as usize);

    // `read_info` takes little memory yet. It also reads a palette's transparency, which the header does not state.
    let mut reader = decoder.read_info().map_err(damaged)?;
    let stored = reader.output_color_type().0.samples();
    check_size(height, width, stored.max(color.channels(stored)), path)?;
    let bytes = reader.output_buffer_size().ok_or_else(|| damaged(DecodingError::LimitsExceeded))?;
    let mut pixels = vec![0; bytes];
    let frame = reader.next_frame(&mut pixels).map_err(damaged)?;
    if frame.buffer_size() != pixels.len() {
        let found = format!("{} x {}", frame.width, frame.height);
        return Err(DataError::corrupt(path, MAGIC.len() as u64, "a first frame that fills the image", found));
    }
    reader.finish().map_err(damaged)?;

    let (pixels, channels) = color.convert(pixels, frame.color_type.samples());
    Image::new(pixels, frame.height as usize, frame.width as usize, channels)
}

fn damaged(error: DecodingError, encoded_bytes: usize, path: &Path) -> DataError {
    match error {
        DecodingError::IoError(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            DataError::corrupt(path, encoded_bytes as u64, "more PNG data", "the end of the file")
        }
        // The decoder does not say at which offset.
        error => DataError::corrupt(path, 0, "an intact PNG image", error.to_string()),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use png::{BitDepth, ColorType, Encoder};

    use super::*;

    pub(crate) fn encode(pixels: &[u8], width: u32, height: u32, color: ColorType, depth: BitDepth) -> Vec<u8> {
        let mut encoded = Vec::new();
        let mut encoder = Encoder::new(&mut encoded, width, height);
        encoder.set_color(color);
        encoder.set_depth(depth);
        if color == ColorType::Indexed {
            encoder.set_palette(vec![1, 2, 3, 40, 50, 60]);
        }
        encoder.write_header().unwrap().write_image_data(pixels).unwrap();
        encoded
    }

    fn decode(encoded: &[u8]) -> Result<Image, DataError> {
        super::super::decode_image(encoded, Color::AsStored, Path::new("some.png"))
    }

    #[test]
    fn every_colour_type_gives_bytes() {
        type Case<'a> = (&'a [u8], ColorType, BitDepth, usize, &'a [u8]);
        let cases: [Case<'_>; 7] = [
            (&[1, 200], ColorType::Grayscale, BitDepth::Eight, 1, &[1, 200]),
            (&[0b0100_0000], ColorType::Grayscale, BitDepth::One, 1, &[0, 255]),
            (&[1, 99, 200, 99], ColorType::Grayscale, BitDepth::Sixteen, 1, &[1, 200]),
            (&[1, 9, 200, 8], ColorType::GrayscaleAlpha, BitDepth::Eight, 2, &[1, 9, 200, 8]),
            (&[1, 2, 3, 4, 5, 6], ColorType::Rgb, BitDepth::Eight, 3, &[1, 2, 3, 4, 5, 6]),
            (&[1, 2, 3, 4, 5, 6, 7, 8], ColorType::Rgba, BitDepth::Eight, 4, &[1, 2, 3, 4, 5, 6, 7, 8]),
            (&[1, 0], ColorType::Indexed, BitDepth::Eight, 3, &[40, 50, 60, 1, 2, 3]),
        ];
        for (pixels, color, depth, channels, expected) in cases {
            let image = decode(&encode(pixels, 2, 1, color, depth)).unwrap();
            assert_eq!((image.data(), image.chw()), (expected, [channels, 1, 2]), "{color:?} {depth:?}");
        }
    }

    #[test]
    fn every_cut_and_every_flipped_byte_is_an_error_or_the_same_image() {
        let pixels: Vec<u8> = (0..28 * 28).map(|i| (i * i % 253) as u8).collect();
        let whole = encode(&pixels, 28, 28, ColorType::Grayscale, BitDepth::Eight);
        assert_eq!(decode(&whole).unwrap().data(), pixels);
        for cut in 0..whole.len() {
            let error = decode(&whole[..cut]).expect_err("a truncated image");
            assert!(error.to_string().starts_with("some.png: "), "{error}");
        }
        for position in 0..whole.len() {
            let mut flipped = whole.clone();
            flipped[position] ^= 0x55;
            if let Ok(image) = decode(&flipped) {
                assert_eq!(image.data(), pixels, "flipped at {position}");
            }
        }
    }

    #[test]
    fn absurd_sizes_are_refused_before_memory_is_taken() {
        let mut encoded = encode(&[1], 1, 1, ColorType::Grayscale, BitDepth::Eight);
        encoded[16..24].copy_from_slice(&[0x7f, 0xff, 0xff, 0xff, 0x7f, 0xff, 0xff, 0xff]);
        let checksum = crc32(&encoded[12..29]);
        encoded[29..33].copy_from_slice(&checksum.to_be_bytes());
        let error = decode(&encoded).unwrap_err().to_string();
        assert!(error.contains("2147483647 x 2147483647 pixels"), "{error}");
    }

    #[test]
    fn the_limit_counts_the_bytes_that_an_image_takes() {
        // A file as long as the declared size needs at least, with no image data for it.
        let declared = |side: u32, type_of: ColorType, color| {
            let channels = type_of.samples();
            let mut encoded = encode(&vec![1; channels], 1, 1, type_of, BitDepth::Eight);
            encoded[16..20].copy_from_slice(&side.to_be_bytes());
            encoded[20..24].copy_from_slice(&side.to_be_bytes());
            let checksum = crc32(&encoded[12..29]);
            encoded[29..33].copy_from_slice(&checksum.to_be_bytes());
            encoded.resize(1 << 20, 0);
            super::super::decode_image(&encoded, color, Path::new("some.png")).unwrap_err()
        };
        let refused = |error| match error {
            DataError::TooLarge { bytes, .. } => Some(bytes),
            _ => None,
        };
        for (side, type_of, color, expected) in [
            (13_377, ColorType::Rgb, Color::AsStored, None),
            (13_378, ColorType::Rgb, Color::Rgb, Some(3 * 13_378 * 13_378)),
            (13_378, ColorType::Rgb, Color::Grey, Some(3 * 13_378 * 13_378)),
            (11_586, ColorType::Rgba, Color::AsStored, Some(4 * 11_586 * 11_586)),
            (20_000, ColorType::Grayscale, Color::AsStored, None),
            (20_000, ColorType::Grayscale, Color::Rgb, Some(3 * 20_000 * 20_000)),
        ] {
            assert_eq!(refused(declared(side, type_of, color)), expected, "{side} {type_of:?} {color:?}");
        }
    }

    #[test]
    fn a_file_that_is_not_an_image_is_named() {
        assert!(matches!(decode(b"GIF89a, which no decoder is for"), Err(DataError::UnknownFormat { .. })));
        assert!(decode(b"").unwrap_err().to_string().contains("some.png"));
    }

    fn crc32(bytes: &[u8]) -> u32 {
        let mut crc = flate2::Crc::new();
        crc.update(bytes);
        crc.sum()
    }
}
