//! This crate's own JPEG decoder, for baseline and progressive files.
//!
//! It exists for crops: it runs the inverse DCT and colour conversion only for the blocks that a region needs. In a
//! file of one scan it stops after the region's last row; restart markers let it skip the data before the region's
//! first row. Its pixels equal those of libjpeg-turbo's default settings, and so Pillow's and torchvision's, bit for
//! bit.
//!
//! JPEG has no checksums, so a flipped bit that leaves the codes readable silently changes pixels. Missing or surplus
//! data is noticed at restart markers; missing data also at the end of a scan, if decoding gets that far. Bytes after
//! the last block are allowed, since cameras pad there, and stray bytes before a marker are skipped.

mod bits;
mod color;
mod exif;
mod header;
mod huffman;
mod idct;
mod planes;
mod progressive;
mod scan;
mod segments;
#[cfg(feature = "libjpeg-turbo")]
mod turbo;
mod upsample;

use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;

use super::{check_bytes, check_size};
use crate::{Color, DataError, Image, Region};

pub(crate) const MAGIC: &[u8] = b"\xff\xd8\xff";

/// A header that declares more pixels than this per byte of the file is wrong: in any kind of JPEG, a block of 64
/// pixels takes at least one bit.
const MOST_PIXELS_A_BYTE: u64 = 8 * 64;

/// Buffers above this size are freed after the image that needed them.
const KEPT_BYTES: usize = 64 << 20;

pub(crate) use exif::orientation;

/// What is wrong with a file, and at which offset.
#[derive(Clone, Copy, Debug)]
struct Fault {
    at: usize,
    found: &'static str,
}

impl Fault {
    fn error(self, path: &Path) -> DataError {
        DataError::corrupt(path, self.at as u64, "an intact JPEG image", self.found)
    }
}

/// The buffers of the decoder, kept from one image to the next.
#[derive(Default)]
struct Scratch {
    segments: segments::Segments,
    coefficients: [progressive::Coefficients; 4],
    planes: [planes::Plane; 4],
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Scratch {
    fn trim(&mut self) {
        let coefficients: usize = self.coefficients.iter().map(progressive::Coefficients::held).sum();
        let planes: usize = self.planes.iter().map(planes::Plane::held).sum();
        if coefficients + planes + self.segments.held() > KEPT_BYTES {
            *self = Self::default();
        }
    }
}

/// A file whose headers have been read up to the first scan.
pub(crate) struct Jpeg<'a> {
    markers: header::Markers<'a>,
    scan: header::Scan,
    path: &'a Path,
}

impl<'a> Jpeg<'a> {
    /// Reads the headers.
    pub(crate) fn open(encoded: &'a [u8], path: &'a Path) -> Result<Self, DataError> {
        let (markers, scan) = header::Markers::open(encoded).map_err(|fault| fault.error(path))?;
        let jpeg = Self { markers, scan, path };
        let (height, width) = (jpeg.height(), jpeg.width());
        let pixels = height as u64 * width as u64;
        if pixels > (encoded.len() as u64).saturating_mul(MOST_PIXELS_A_BYTE) {
            let expected = format!("data for {width} x {height} pixels");
            return Err(DataError::corrupt(path, 0, expected, format!("{} bytes", encoded.len())));
        }
        Ok(jpeg)
    }

    /// Refuses an image that is too large with `channels` channels, or whose coefficients take too much memory.
    pub(crate) fn check_size(&self, channels: usize) -> Result<(), DataError> {
        let coefficients = if self.is_one_scan() { 0 } else { progressive::bytes(&self.markers.frame) };
        check_bytes(coefficients, self.path)?;
        check_size(self.height(), self.width(), channels, self.path)
    }

    pub(crate) fn height(&self) -> usize {
        self.markers.frame.height
    }

    pub(crate) fn width(&self) -> usize {
        self.markers.frame.width
    }

    /// Scales the image to `eighths` eighths of its size (8 is the full size), and decodes `region` of the scaled image
    /// to pixels of `N` bytes.
    ///
    /// The data after the region is only searched for the marker that ends it, so that a truncated file is an error all
    /// the same.
    pub(crate) fn decode<const N: usize>(
        &self,
        region: &Region,
        eighths: usize,
        pixels: &mut [u8],
    ) -> Result<(), DataError> {
        let path = self.path;
        #[cfg(feature = "libjpeg-turbo")]
        if turbo::decode::<N>(self, region, eighths, pixels) {
            return Ok(());
        }
        SCRATCH.with_borrow_mut(|scratch| {
            let done = self.decode_with::<N>(region, eighths, pixels, scratch);
            scratch.trim();
            done.map_err(|fault| fault.error(path))
        })
    }

    fn decode_with<const N: usize>(
        &self,
        region: &Region,
        eighths: usize,
        pixels: &mut [u8],
        scratch: &mut Scratch,
    ) -> Result<(), Fault> {
        let Scratch { segments, coefficients, planes } = scratch;
        let window = planes::Window::new(&self.markers.frame, region, eighths, planes);
        if self.is_one_scan() {
            segments.read(self.markers.file, self.markers.at)?;
            scan::decode(&self.markers, &self.scan, segments, &window, planes)?;
        } else {
            progressive::decode(self.markers.clone(), &self.scan, segments, coefficients, &window, planes)?;
        }
        color::to_pixels::<N>(&self.markers.frame, planes, region, eighths, pixels);
        Ok(())
    }

    /// Whether the first scan holds the whole image.
    fn is_one_scan(&self) -> bool {
        !self.markers.frame.progressive && self.scan.members.len() == self.markers.frame.components.len()
    }
}

/// Decodes the whole file.
pub(super) fn decode(encoded: &[u8], color: Color, path: &Path) -> Result<Image, DataError> {
    let jpeg = Jpeg::open(encoded, path)?;
    let (height, width) = (jpeg.height(), jpeg.width());
    let whole = Region::whole(height, width);
    let grey = jpeg.markers.frame.model == header::Model::Grey;
    let channels = if grey && color != Color::Rgb { 1 } else { 3 };
    jpeg.check_size(channels)?;
    let mut pixels: Arc<[u8]> = std::iter::repeat_n(0, channels * height * width).collect();
    // Always succeeds: the new `Arc` has no other owner.
    if let Some(pixels) = Arc::get_mut(&mut pixels) {
        match channels {
            1 => jpeg.decode::<1>(&whole, 8, pixels)?,
            _ => jpeg.decode::<3>(&whole, 8, pixels)?,
        }
    }
    if color == Color::Grey && channels == 3 {
        let (pixels, channels) = color.convert(pixels.to_vec(), channels);
        return Image::new(pixels, height, width, channels);
    }
    Image::new(pixels, height, width, channels)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every scale, for images whose sides are not divisible by any.
    #[test]
    fn scaled_images_have_the_pixels_of_pillows_draft() -> Result<(), DataError> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/images");
        let read = |name: String| std::fs::read(folder.join(&name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        for name in ["h2v2", "h2v1", "h1v1", "h1v2", "grey", "progressive"] {
            let file = read(format!("{name}.jpg"));
            for eighths in [4, 2, 1] {
                let png = read(format!("{name}-{eighths}.png"));
                let expected = super::super::decode_image(&png, Color::Rgb, Path::new(name))?;
                let (height, width) = (expected.height(), expected.width());
                let jpeg = Jpeg::open(&file, Path::new(name))?;
                let mut pixels = vec![0; 3 * height * width];
                jpeg.decode::<3>(&Region::whole(height, width), eighths, &mut pixels)?;
                assert!(pixels == expected.data(), "{name} at {eighths}");
                // A part of the image decodes to the same pixels.
                let part = Region { top: height / 3, left: width / 3, height: height / 2, width: width / 2 };
                let mut pixels = vec![0; 3 * part.height * part.width];
                jpeg.decode::<3>(&part, eighths, &mut pixels)?;
                let rows = expected.data().chunks_exact(3 * width).skip(part.top).take(part.height);
                let expected: Vec<u8> = rows.flat_map(|row| &row[3 * part.left..][..3 * part.width]).copied().collect();
                assert!(pixels == expected, "a part of {name} at {eighths}");
            }
        }
        Ok(())
    }
}
