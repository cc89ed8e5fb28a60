//! JPEG: baseline files by this crate's own decoder, every other kind by the `zune-jpeg` crate.
//!
//! The own decoder exists for crops: it transforms and colours only the blocks that a region needs, stops after the
//! region's last row, and skips to its first one where the file has restart markers. Its pixels are those of
//! libjpeg-turbo's default settings, and so Pillow's and torchvision's, to the last bit.

mod bits;
mod color;
mod exif;
mod general;
mod header;
mod huffman;
mod idct;
mod scan;

use std::path::Path;

use super::MAX_IMAGE_BYTES;
use crate::{Color, DataError, Image, Region};

pub(super) const MAGIC: &[u8] = b"\xff\xd8\xff";

/// A block of 64 pixels takes at least one bit in any kind of JPEG, so a header that declares more is wrong.
const MOST_PIXELS_A_BYTE: u64 = 8 * 64;

pub(crate) use exif::orientation;

/// The buffers of the decoder, kept from one image to the next.
#[derive(Default)]
pub(crate) struct Scratch {
    scan: Vec<u8>,
    starts: Vec<usize>,
    planes: [scan::Plane; 3],
}

impl Scratch {
    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        let planes: usize = self.planes.iter().map(|plane| plane.samples.capacity()).sum();
        planes + self.scan.capacity() + self.starts.capacity() * size_of::<usize>()
    }
}

/// A baseline file whose headers have been read.
pub(crate) struct Baseline<'a>(header::Header<'a>);

impl<'a> Baseline<'a> {
    /// Reads the headers; nothing when the file is of another kind or damaged, which [`decode`] tells apart.
    pub(crate) fn open(encoded: &'a [u8], path: &Path) -> Result<Option<Self>, DataError> {
        let Some(header) = header::read(encoded) else { return Ok(None) };
        check_size(header.frame.height, header.frame.width, encoded, path)?;
        Ok(Some(Self(header)))
    }

    pub(crate) fn height(&self) -> usize {
        self.0.frame.height
    }

    pub(crate) fn width(&self) -> usize {
        self.0.frame.width
    }

    /// Decodes `region`, which fits the image, to pixels of red, green, blue and an unused byte.
    ///
    /// The rest of the file is only looked through for its end, so that a truncated one is noticed all the same.
    pub(crate) fn decode(
        &self,
        region: &Region,
        scratch: &mut Scratch,
        pixels: &mut Vec<u8>,
        path: &Path,
    ) -> Result<(), DataError> {
        let Self(header) = self;
        let damaged = |found: &str| DataError::corrupt(path, header.offset as u64, "an intact JPEG scan", found);
        if !header::unstuff(header.data, &mut scratch.scan, &mut scratch.starts) {
            let end = (header.offset + header.data.len()) as u64;
            return Err(DataError::corrupt(path, end, "more JPEG data", "the end of the file"));
        }
        scan::decode(header, &scratch.scan, &scratch.starts, region, &mut scratch.planes).map_err(damaged)?;
        pixels.resize(4 * region.height * region.width, 0);
        color::to_rgbx(&header.frame, &scratch.planes, region, pixels);
        Ok(())
    }

    fn is_grey(&self) -> bool {
        self.0.frame.components.len() == 1
    }
}

/// Decodes the whole file.
pub(super) fn decode(encoded: &[u8], color: Color, path: &Path) -> Result<Image, DataError> {
    let Some(baseline) = Baseline::open(encoded, path)? else { return general::decode(encoded, color, path) };
    let (height, width) = (baseline.height(), baseline.width());
    let mut pixels = Vec::new();
    baseline.decode(&Region::whole(height, width), &mut Scratch::default(), &mut pixels, path)?;
    let (pixels, channels) = match (baseline.is_grey(), color) {
        (true, Color::AsStored | Color::Grey) => (pixels.as_chunks::<4>().0.iter().map(|pixel| pixel[0]).collect(), 1),
        (_, Color::Grey) => Color::Grey.convert(pixels, 4),
        _ => (without_fourth(&pixels), 3),
    };
    Image::new(pixels, height, width, channels)
}

/// Red, green and blue alone.
fn without_fourth(pixels: &[u8]) -> Vec<u8> {
    let (pixels, _) = pixels.as_chunks::<4>();
    let mut rgb = vec![0; 3 * pixels.len()];
    for (to, &[red, green, blue, _]) in rgb.as_chunks_mut::<3>().0.iter_mut().zip(pixels) {
        *to = [red, green, blue];
    }
    rgb
}

/// Refuses what is too large or declares more than the file can hold, before memory is taken.
fn check_size(height: usize, width: usize, encoded: &[u8], path: &Path) -> Result<(), DataError> {
    let pixels = height as u64 * width as u64;
    if pixels > (encoded.len() as u64).saturating_mul(MOST_PIXELS_A_BYTE) {
        let expected = format!("data for {width} x {height} pixels");
        return Err(DataError::corrupt(path, 0, expected, format!("{} bytes", encoded.len())));
    }
    let (bytes, limit) = (pixels.saturating_mul(4), MAX_IMAGE_BYTES);
    if bytes > limit {
        return Err(DataError::TooLarge { path: path.to_owned(), what: "the decoded image", bytes, limit });
    }
    Ok(())
}
