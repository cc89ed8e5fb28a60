//! Whole images, parts and scaled sizes, beside Pillow's pixels.

use overdrive_jpeg::{Error, Jpeg, Region, Scale, orientation};

use crate::{decode, part, read};

/// Every kind of file, each beside a PNG file of Pillow's pixels.
const KINDS: [&str; 17] = [
    "cmyk",
    "grey",
    "h1v1",
    "h1v2",
    "h2v1",
    "h2v2",
    "h4v1",
    "odd",
    "one",
    "progressive",
    "progressive-cmyk",
    "progressive-grey",
    "progressive-restarts",
    "restarts",
    "rgb",
    "scans",
    "ycck",
];

/// An image of RGB.
struct Image {
    height: usize,
    width: usize,
    pixels: Vec<u8>,
}

impl Image {
    /// Pillow's pixels of a file.
    fn of(name: &str) -> Self {
        let file = read(&format!("{name}.png"));
        let mut decoder = png::Decoder::new(std::io::Cursor::new(file));
        decoder.set_transformations(png::Transformations::EXPAND);
        let mut reader = decoder.read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let frame = reader.next_frame(&mut pixels).unwrap();
        pixels.truncate(frame.buffer_size());
        assert_eq!(frame.color_type, png::ColorType::Rgb, "{name}");
        Self { height: frame.height as usize, width: frame.width as usize, pixels }
    }

    fn part(&self, region: &Region) -> Vec<u8> {
        let rows = self.pixels.chunks_exact(3 * self.width).skip(region.top).take(region.height);
        rows.flat_map(|row| &row[3 * region.left..][..3 * region.width]).copied().collect()
    }
}

/// Compares the whole and every part whose edges are 11 pixels apart, and each single row and column.
fn compare(jpeg: &Jpeg<'_>, scale: Scale, expected: &Image, name: &str) {
    let Image { height, width, .. } = *expected;
    assert_eq!((scale.side(jpeg.height()), scale.side(jpeg.width())), (height, width), "{name} {scale:?}");
    let mut regions = vec![Region::whole(height, width)];
    regions.extend((0..height).map(|top| Region { top, height: 1, ..Region::whole(height, width) }));
    regions.extend((0..width).map(|left| Region { left, width: 1, ..Region::whole(height, width) }));
    let spans = |side: usize| {
        (0..side).step_by(11).flat_map(move |start| (start..side).step_by(11).map(move |end| (start, end + 1 - start)))
    };
    for (top, height) in spans(height) {
        regions.extend(spans(width).map(|(left, width)| Region { top, left, height, width }));
    }
    for region in regions {
        let found = part(jpeg, &region, scale).unwrap_or_else(|error| panic!("{name} {scale:?} {region:?}: {error}"));
        assert!(found == expected.part(&region), "{name} {scale:?} {region:?}");
    }
}

#[test]
fn every_kind_has_pillows_pixels_and_so_has_every_part() {
    for name in KINDS {
        let file = read(&format!("{name}.jpg"));
        compare(&Jpeg::open(&file).unwrap(), Scale::Full, &Image::of(name), name);
    }
}

/// Images whose sides no scale divides, and one whose sides all do.
#[test]
fn scaled_images_have_the_pixels_of_pillows_draft() {
    for name in ["h2v2", "h2v1", "h1v1", "h1v2", "grey", "progressive", "even"] {
        let file = read(&format!("{name}.jpg"));
        let jpeg = Jpeg::open(&file).unwrap();
        for scale in [Scale::Half, Scale::Quarter, Scale::Eighth] {
            compare(&jpeg, scale, &Image::of(&format!("{name}-{}", scale.eighths())), name);
        }
    }
}

#[test]
fn a_pixel_has_one_three_or_four_bytes() {
    for (name, grey) in [("grey", true), ("progressive-grey", true), ("h2v2", false), ("cmyk", false)] {
        let file = read(&format!("{name}.jpg"));
        let jpeg = Jpeg::open(&file).unwrap();
        let whole = Region::whole(jpeg.height(), jpeg.width());
        let rgb = decode(&file).unwrap();
        let mut four = vec![7; 4 * whole.height * whole.width];
        jpeg.decode::<4>(&whole, Scale::Full, &mut four).unwrap();
        let expected: Vec<u8> = rgb.chunks_exact(3).flat_map(|pixel| [pixel[0], pixel[1], pixel[2], 0]).collect();
        assert!(four == expected, "{name}");
        let mut one = vec![0; whole.height * whole.width];
        let done = jpeg.decode::<1>(&whole, Scale::Full, &mut one);
        assert_eq!((jpeg.is_grey(), done), (grey, if grey { Ok(()) } else { Err(Error::NotGrey) }), "{name}");
        assert!(!grey || one.iter().eq(rgb.iter().step_by(3)), "{name}");
    }
}

#[test]
fn regions_and_buffers_that_do_not_fit_are_refused() {
    let file = read("h2v2.jpg");
    let jpeg = Jpeg::open(&file).unwrap();
    let (height, width) = (jpeg.height(), jpeg.width());
    let whole = Region::whole(height, width);
    for region in [
        Region { height: 0, ..whole },
        Region { width: 0, ..whole },
        Region { top: 1, ..whole },
        Region { left: 1, ..whole },
        Region { top: usize::MAX, ..whole },
        Region { width: usize::MAX, left: 1, ..whole },
    ] {
        let refused = Err(Error::Region { height, width, region });
        assert_eq!(jpeg.decode::<3>(&region, Scale::Full, &mut []), refused);
    }
    let half = [height.div_ceil(2), width.div_ceil(2)];
    let refused = Err(Error::Region { height: half[0], width: half[1], region: whole });
    assert_eq!(jpeg.decode::<3>(&whole, Scale::Half, &mut vec![0; 3 * height * width]), refused);
    for found in [0, 3 * height * width - 1, 3 * height * width + 1, 4 * height * width] {
        let refused = Err(Error::Buffer { expected: 3 * height * width, found });
        assert_eq!(jpeg.decode::<3>(&whole, Scale::Full, &mut vec![0; found]), refused);
    }
}

#[test]
fn the_orientation_is_exifs() {
    assert_eq!((orientation(&read("turned.jpg")), orientation(&read("h2v2.jpg"))), (6, 1));
    assert_eq!((orientation(b""), orientation(b"\xff\xd8\xff\xe1\0\x08Exif")), (1, 1));
}
