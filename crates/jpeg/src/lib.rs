#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod bits;
mod color;
mod error;
mod exif;
mod header;
mod huffman;
mod idct;
mod planes;
mod progressive;
mod region;
mod scale;
mod scan;
mod segments;
mod upsample;

use std::cell::RefCell;
use std::fmt;

pub use error::Error;
pub use exif::orientation;
pub use region::Region;
pub use scale::Scale;

use header::{Markers, Model};

/// The bytes that every JPEG file begins with.
pub const MAGIC: &[u8] = b"\xff\xd8\xff";

/// A header that declares more pixels than this per byte of the file is wrong: in any kind of JPEG, a block of 64
/// pixels takes at least one bit.
const MOST_PIXELS_A_BYTE: u64 = 8 * 64;

/// Buffers above this size are freed after the image that needed them.
const KEPT_BYTES: usize = 64 << 20;

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

/// A file whose headers have been read, up to the first scan.
pub struct Jpeg<'a> {
    markers: Markers<'a>,
    scan: header::Scan,
}

impl<'a> Jpeg<'a> {
    /// Reads the headers.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Unsupported`]; [`Error::TooShort`] for a header that declares more pixels than the
    /// file can hold.
    pub fn open(file: &'a [u8]) -> Result<Self, Error> {
        let (markers, scan) = Markers::open(file)?;
        let (height, width) = (markers.frame.height, markers.frame.width);
        if height as u64 * width as u64 > (file.len() as u64).saturating_mul(MOST_PIXELS_A_BYTE) {
            return Err(Error::TooShort { width, height, bytes: file.len() });
        }
        Ok(Self { markers, scan })
    }

    /// The file.
    pub fn file(&self) -> &'a [u8] {
        self.markers.file
    }

    /// Rows.
    pub fn height(&self) -> usize {
        self.markers.frame.height
    }

    /// Columns.
    pub fn width(&self) -> usize {
        self.markers.frame.width
    }

    /// Whether it has brightness alone, no colour.
    pub fn is_grey(&self) -> bool {
        self.markers.frame.model == Model::Grey
    }

    /// Bytes of memory for the coefficients of an image of several scans, which are all kept until the last scan has
    /// been read; 0 for an image of one scan. They can be thousands of times the file's size: compare them with a limit
    /// before decoding a file that you do not trust.
    pub fn coefficient_bytes(&self) -> u64 {
        if self.is_one_scan() { 0 } else { progressive::bytes(&self.markers.frame) }
    }

    /// Decodes `region` of the image scaled by `scale`, to `N` bytes a pixel: 1 for grey, 3 for RGB, 4 for RGB and a
    /// byte of 0. CMYK becomes RGB.
    ///
    /// The data after the region is only searched for the marker that ends it, so that a truncated file is an error all
    /// the same. Buffers of up to 64 MiB are kept for the thread's next image.
    ///
    /// # Shapes
    /// `pixels` is `[region.height, region.width, N]`, row-major.
    ///
    /// # Errors
    /// [`Error::Region`] and [`Error::Buffer`] for a region beyond the scaled image and a buffer of another length;
    /// [`Error::NotGrey`] for one byte a pixel of an image in colour; [`Error::Damaged`]. Then `pixels` may have
    /// changed.
    pub fn decode<const N: usize>(&self, region: &Region, scale: Scale, pixels: &mut [u8]) -> Result<(), Error> {
        const { assert!(matches!(N, 1 | 3 | 4), "a pixel has 1, 3 or 4 bytes") };
        let (height, width) = (scale.side(self.height()), scale.side(self.width()));
        if !region.fits(height, width) {
            return Err(Error::Region { height, width, region: *region });
        }
        let (expected, found) = (N * region.height * region.width, pixels.len());
        if expected != found {
            return Err(Error::Buffer { expected, found });
        }
        if N == 1 && !self.is_grey() {
            return Err(Error::NotGrey);
        }
        SCRATCH.with_borrow_mut(|scratch| {
            let done = self.samples(region, scale, scratch);
            if done.is_ok() {
                color::to_pixels::<N>(&self.markers.frame, &scratch.planes, region, scale, pixels);
            }
            scratch.trim();
            done
        })
    }

    /// Decodes the components' samples around `region`.
    fn samples(&self, region: &Region, scale: Scale, scratch: &mut Scratch) -> Result<(), Error> {
        let Scratch { segments, coefficients, planes } = scratch;
        let window = planes::Window::new(&self.markers.frame, region, scale, planes);
        if !self.is_one_scan() {
            return progressive::decode(self.markers.clone(), &self.scan, segments, coefficients, &window, planes);
        }
        segments.read(self.markers.file, self.markers.at)?;
        scan::decode(&self.markers, &self.scan, segments, &window, planes)
    }

    /// Whether the first scan holds the whole image.
    fn is_one_scan(&self) -> bool {
        !self.markers.frame.progressive && self.scan.members.len() == self.markers.frame.components.len()
    }

    /// Whether libjpeg-turbo may take this crate's place: where it decodes the file to RGB without a warning, it gives
    /// the same pixels, and this crate would not refuse the file.
    ///
    /// False for CMYK, which it does not turn into RGB, for restart markers, with which this crate skips data, for
    /// missing tables, which it replaces by default ones, and for a file without an end, where it does not look.
    pub fn suits_libjpeg(&self) -> bool {
        let Markers { file, at, frame, restart_interval, .. } = &self.markers;
        let complete = || self.scan.members.iter().all(|member| scan::tables(&self.markers, member).is_ok());
        !matches!(frame.model, Model::Cmyk | Model::Ycck)
            && *restart_interval == 0
            && (!self.is_one_scan() || complete())
            && memchr::memmem::rfind(&file[*at..], b"\xff\xd9").is_some()
    }
}

impl fmt::Debug for Jpeg<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Jpeg {{ width: {}, height: {} }}", self.width(), self.height())
    }
}
