//! Compares decoded images with Pillow's pixels, and checks that detectable damage is an error.

use std::path::Path;
use std::sync::Arc;

use overdrive_dataload::{
    Canvas, Color, DataError, Draws, EncodedImage, Image, ImagePipeline, Interpolation, MAX_IMAGE_BYTES,
    RandomResizedCrop, Region, Resize, Transform, decode_image,
};

fn read(name: &str) -> Vec<u8> {
    let path = crate::image(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn decode(name: &str) -> Image {
    decode_image(&read(name), Color::Rgb, Path::new(name)).unwrap()
}

fn refused(bytes: &[u8]) -> String {
    let error = decode_image(bytes, Color::Rgb, Path::new("some.jpg")).expect_err("a damaged image");
    crate::names_file(&error, "some.jpg")
}

fn run(bytes: impl Into<Arc<[u8]>>, pipeline: &ImagePipeline, [height, width]: [usize; 2]) -> Result<Image, DataError> {
    let sample = EncodedImage::new(bytes, "some.jpg");
    let mut pixels = vec![0; 3 * height * width];
    pipeline.clone().channels_last(true).decode_into(&sample, DRAW, EPOCH, &mut pixels)?;
    Image::new(pixels, height, width, 3)
}

const SEED: u64 = 0;
const EPOCH: u64 = 0;
const DRAW: u64 = 0;

/// The offset of each marker whose code is in this range.
fn markers(bytes: &[u8], kind: std::ops::RangeInclusive<u8>) -> Vec<usize> {
    (0..bytes.len() - 1).filter(|&at| bytes[at] == 0xff && kind.contains(&bytes[at + 1])).collect()
}

struct Crop(Region);

impl Transform for Crop {
    fn apply(&self, canvas: &mut Canvas<'_>, _: &mut Draws) -> Result<(), DataError> {
        canvas.crop(self.0)
    }
}

#[test]
fn uncommon_jpegs_have_pillows_pixels() -> Result<(), DataError> {
    let names =
        ["h1v2", "h4v1", "odd", "rgb", "scans", "progressive-restarts", "progressive-grey", "progressive-cmyk", "ycck"];
    for name in names {
        let (file, whole) = (format!("{name}.jpg"), decode(&format!("{name}.png")));
        assert!(decode(&file).data() == whole.data(), "{name}");
        let mut draws = Draws::new(SEED, EPOCH, DRAW, 0);
        for _ in 0..50 {
            let region = RandomResizedCrop::new(8).region(whole.height(), whole.width(), &mut draws);
            let crop = ImagePipeline::new(SEED).then(Crop(region));
            let ours = run(read(&file), &crop, [region.height, region.width])?;
            assert!(ours.data() == crop.image(&whole, DRAW, EPOCH)?.data(), "{name} {region:?}");
        }
    }
    Ok(())
}

#[test]
fn uncommon_pngs_and_webps_have_pillows_pixels() {
    for (file, reference) in [
        ("interlaced.png", "interlaced-plain.png"),
        ("sixteen.png", "sixteen-plain.png"),
        ("palette.png", "palette-plain.png"),
        ("animated.webp", "animated.png"),
    ] {
        assert!(decode(file).data() == decode(reference).data(), "{file}");
    }
    let palette = decode_image(&read("palette.png"), Color::AsStored, Path::new("palette.png")).unwrap();
    // A colour of the palette is half transparent.
    assert_eq!(palette.channels(), 4);
    assert!(palette.data().chunks_exact(4).any(|pixel| pixel[3] == 128));
}

#[test]
fn dct_scaling_equals_pillows_image_draft() -> Result<(), DataError> {
    // 64 x 48 pixels: every scale gives whole pixels, so that no resize is needed after it.
    let wide = [[48, 64], [24, 32], [12, 16], [6, 8]];
    for (eighths, size) in [8, 4, 2, 1].into_iter().zip(wide) {
        let scaled = ImagePipeline::new(SEED).dct_scaling(true).then(Resize::new(size));
        let expected = decode(&format!("even-{eighths}.png"));
        assert!(run(read("even.jpg"), &scaled, size)?.data() == expected.data(), "{eighths}");
        // Off by default.
        let filtered = ImagePipeline::new(SEED).then(Resize::new(size));
        assert_eq!(run(read("even.jpg"), &filtered, size)?.data() == expected.data(), eighths == 8);
    }
    // The decoder does not scale below the requested size: 25 rows need the full image, since half of it has only 24.
    // For nearest-neighbour resizing it does not scale at all.
    for (size, interpolation) in [([25, 32], Interpolation::Bilinear), ([12, 16], Interpolation::Nearest)] {
        let [plain, scaled] = [false, true].map(|on| {
            let pipeline = ImagePipeline::new(SEED).dct_scaling(on);
            run(read("even.jpg"), &pipeline.then(Resize::new(size).interpolation(interpolation)), size)
        });
        assert!(plain?.data() == scaled?.data(), "{interpolation:?}");
    }
    Ok(())
}

#[test]
fn a_scaled_crop_keeps_its_position() -> Result<(), DataError> {
    // In a brightness ramp, a wrong crop position shows as a difference in brightness.
    let ramp: Vec<u8> = (0..64 * 64).flat_map(|i| [(i % 64 * 4) as u8, (i / 64 * 4) as u8, 128]).collect();
    let ramp = Image::new(ramp, 64, 64, 3)?;
    let file = read("ramp.jpg");
    for (top, left, side) in [(0, 0, 64), (3, 5, 33), (17, 21, 40), (31, 31, 32), (6, 29, 35)] {
        let crop = || Crop(Region { top, left, height: side, width: side });
        let resize = || Resize::new([8, 8]);
        let exact = ImagePipeline::new(SEED).then(crop()).then(resize()).image(&ramp, DRAW, EPOCH)?;
        let scaled = run(&*file, &ImagePipeline::new(SEED).dct_scaling(true).then(crop()).then(resize()), [8, 8])?;
        let largest_difference = exact.data().iter().zip(scaled.data()).map(|(a, b)| a.abs_diff(*b)).max();
        // The ramp rises by 4 levels per pixel, so an offset of half a pixel makes 2. Allow 2 more for the border and
        // the compression.
        assert!(largest_difference <= Some(4), "{top} {left} {side}: {largest_difference:?}");
    }
    Ok(())
}

#[test]
fn damage_at_restart_markers_is_noticed() {
    let whole = read("restarts.jpg");
    let restarts = markers(&whole, 0xd0..=0xd7);
    assert_eq!(restarts.len(), 3);
    for &at in &restarts {
        let mut wrong = whole.clone();
        wrong[at + 1] ^= 1;
        assert!(refused(&wrong).contains("restart markers that are out of order"));
        let mut more = whole.clone();
        more.insert(at, 0x55);
        assert!(refused(&more).contains("surplus bytes before a restart marker"));
        let mut fewer = whole.clone();
        fewer.drain(at - 3..at);
        assert!(refused(&fewer).contains("the end of its data"));
    }
    let mut none = whole.clone();
    let last = *restarts.last().unwrap();
    none.drain(last..last + 2);
    assert!(refused(&none).contains("a wrong number of restart markers"));
}

/// The offsets of the marker segments from the second one to the header of the first scan, inclusive.
fn segments(bytes: &[u8]) -> Vec<usize> {
    let mut at = 2;
    let next = || {
        let length = usize::from(u16::from_be_bytes([bytes[at + 2], bytes[at + 3]]));
        at += 2 + length;
        (bytes[at - 2 - length + 1] != 0xda).then_some(at)
    };
    std::iter::from_fn(next).collect()
}

#[test]
fn stray_bytes_between_segments_are_skipped_as_libjpeg_does() -> Result<(), DataError> {
    for name in ["h2v2", "restarts", "scans", "progressive", "turned"] {
        let (file, expected) = (read(&format!("{name}.jpg")), decode(&format!("{name}.jpg")));
        let upright = ImagePipeline::new(SEED).exif_orientation(true);
        let size = [expected.height(), expected.width()];
        let size = if name == "turned" { [size[1], size[0]] } else { size };
        let turned = run(file.clone(), &upright, size)?;
        assert!(segments(&file).len() > 4, "{name}");
        for at in segments(&file) {
            for stray in [&[0x55][..], &[0; 7], b"\xff\x00", b"\x12\xff\x00\x34\xff\xff", b"\xff\xd3", b"\xff\x01"] {
                let bytes = [&file[..at], stray, &file[at..]].concat();
                assert!(decode_image(&bytes, Color::Rgb, Path::new(name))?.data() == expected.data(), "{name} at {at}");
                assert!(run(bytes, &upright, size)?.data() == turned.data(), "{name} at {at}");
            }
        }
    }
    Ok(())
}

#[test]
fn errors_name_missing_tables_and_unsupported_jpegs() {
    let whole = read("h2v2.jpg");
    let without = |kind: u8| {
        let mut bytes = whole.clone();
        for at in markers(&whole, kind..=kind) {
            bytes[at + 1] = 0xfe; // a comment, which the decoder skips
        }
        bytes
    };
    assert!(refused(&without(0xc4)).contains("a missing Huffman table"));
    assert!(refused(&without(0xdb)).contains("a missing quantization table"));
    assert!(refused(&without(0xc0)).contains("a damaged scan header"));
    let frame = markers(&whole, 0xc0..=0xc0)[0];
    for kind in [0xc3, 0xc9, 0xca] {
        let mut other = whole.clone();
        other[frame + 1] = kind;
        assert!(refused(&other).contains("a kind of JPEG other than baseline and progressive"));
    }
    // Offsets in the frame segment: 4 is the precision, 9 the number of components, 11 the first component's sampling
    // factors, 12 its quantization table.
    for (offset, value, expected) in [
        (4, 12, "samples of other than 8 bits"),
        (9, 2, "a damaged frame header"),
        (11, 0x03, "sampling factors that are not supported"),
        (11, 0x51, "sampling factors that are not supported"),
        (12, 9, "a missing quantization table"),
    ] {
        let mut other = whole.clone();
        other[frame + offset] = value;
        assert!(refused(&other).contains(expected), "{}", refused(&other));
    }
    let mut flat = whole.clone();
    flat[frame + 5..frame + 7].fill(0);
    assert!(refused(&flat).contains("a damaged frame header"));
}

#[test]
fn declared_sizes_are_checked_before_memory_is_taken() {
    for name in ["h2v2.jpg", "grey.jpg", "cmyk.jpg", "progressive.jpg", "progressive-cmyk.jpg", "rgb.jpg"] {
        let mut huge = read(name);
        let frame = markers(&huge, 0xc0..=0xc2)[0];
        huge[frame + 5..frame + 9].fill(0xff);
        assert!(refused(&huge).contains("expected data for 65535 x 65535 pixels"), "{name}");
        // A file that could hold the declared pixels is refused because of the memory that they would take.
        huge.resize(10 << 20, 0);
        let error = decode_image(&huge, Color::Rgb, Path::new("some.jpg")).unwrap_err();
        let bytes = match error {
            DataError::TooLarge { bytes, limit: MAX_IMAGE_BYTES, .. } => bytes,
            other => panic!("{other}"),
        };
        let pixels = 3 * 65535 * 65535;
        // A progressive image also takes memory for its coefficients.
        let fits = if name.starts_with("progressive") { bytes >= pixels } else { bytes == pixels };
        assert!(fits, "{name}: {bytes}");
    }
    // The coefficients of 4 components, 2 bytes each, take more memory than the 3 bytes of a pixel.
    let mut large = read("progressive-cmyk.jpg");
    let frame = markers(&large, 0xc2..=0xc2)[0];
    large[frame + 5..frame + 9].copy_from_slice(&[0x20, 0, 0x30, 0]);
    large.resize(1 << 20, 0);
    assert!(matches!(
        decode_image(&large, Color::Rgb, Path::new("some.jpg")),
        Err(DataError::TooLarge { bytes, .. }) if bytes == 8192 * 12288 * 8
    ));
}

#[test]
fn too_many_scans_are_refused() {
    // Each scan is a pass over the image, so a small file could keep the decoder busy for hours.
    let whole = read("progressive.jpg");
    let scan = markers(&whole, 0xda..=0xda);
    let first = &whole[scan[0]..scan[1]];
    let many: Vec<u8> = [&whole[..scan[0]], &first.repeat(300), &whole[scan[1]..]].concat();
    assert!(refused(&many).contains("more than 256 scans"));
    // The fifth scan visits most coefficients of the first component.
    let (start, tables) = (scan[4], markers(&whole, 0xc4..=0xc4));
    let end = *tables.iter().find(|&&table| table > start).unwrap();
    let many: Vec<u8> = [&whole[..start], &whole[start..end].repeat(100), &whole[end..]].concat();
    assert!(refused(&many).contains("scans of more bits than the coefficients have"));
}

#[test]
fn the_eight_orientations_are_turned_upright() -> Result<(), DataError> {
    let stored = decode("turned.jpg");
    let (height, width) = (stored.height(), stored.width());
    let file = read("turned.jpg");
    // The orientation's tag is 0x0112, in either byte order, and its value in this file is 6.
    let tag = file.windows(2).position(|pair| pair == b"\x01\x12" || pair == b"\x12\x01").unwrap();
    let value = (tag + 8..tag + 12).find(|&at| file[at] == 6).unwrap();
    // The stored position of each pixel, by `ImageOps.exif_transpose` of Pillow.
    type Stored = fn(usize, usize, usize, usize) -> (usize, usize);
    let orientations: [Stored; 8] = [
        |y, x, _, _| (y, x),
        |y, x, _, w| (y, w - 1 - x),
        |y, x, h, w| (h - 1 - y, w - 1 - x),
        |y, x, h, _| (h - 1 - y, x),
        |y, x, _, _| (x, y),
        |y, x, h, _| (h - 1 - x, y),
        |y, x, h, w| (h - 1 - x, w - 1 - y),
        |y, x, _, w| (x, w - 1 - y),
    ];
    for (number, stored_position) in (1u8..).zip(orientations) {
        let mut bytes = file.clone();
        bytes[value] = number;
        let size = if number < 5 { [height, width] } else { [width, height] };
        let upright = run(bytes, &ImagePipeline::new(SEED).exif_orientation(true), size)?;
        for (at, pixel) in upright.data().chunks_exact(3).enumerate() {
            let (y, x) = stored_position(at / size[1], at % size[1], height, width);
            assert_eq!(pixel, &stored.data()[3 * (y * width + x)..][..3], "{number}: {y} {x}");
        }
    }
    Ok(())
}
