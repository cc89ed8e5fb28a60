//! The samples of the components, before they are combined into pixels.

use std::ops::Range;

use crate::header::Frame;
use crate::{Region, Scale, idct};

/// The samples of one component within the window of blocks that a region needs.
#[derive(Default)]
pub(crate) struct Plane {
    samples: Vec<u8>,
    /// Samples per row of the plane.
    pub(crate) stride: usize,
    /// Samples across and down in each block: 8, fewer where the image is scaled.
    pub(crate) size: usize,
    /// The plane's first column and row, in the component's coordinates.
    pub(crate) left: usize,
    pub(crate) top: usize,
    /// The component's own size, without the padding to whole blocks.
    pub(crate) width: usize,
    pub(crate) height: usize,
}

impl Plane {
    /// The samples of a row of the component; a row outside it is clamped to the nearest one.
    pub(crate) fn row(&self, y: isize) -> &[u8] {
        let y = y.clamp(0, self.height as isize - 1) as usize - self.top;
        &self.samples[y * self.stride..][..self.stride]
    }

    /// Runs the inverse DCT of a block, whose row and column count the component's blocks, into its place. The
    /// coefficients after the one at `last`, in the file's order, are 0.
    #[inline(always)]
    pub(crate) fn put(&mut self, row: usize, column: usize, block: &[i16; 64], last: usize) {
        let at = (row * self.size - self.top) * self.stride + column * self.size - self.left;
        let out = &mut self.samples[at..];
        match self.size {
            8 if last == 0 => idct::flat(block[0], out, self.stride),
            8 => idct::full(block, last, out, self.stride),
            size => idct::reduced(block, size, out, self.stride),
        }
    }

    /// Bytes held.
    pub(crate) fn held(&self) -> usize {
        self.samples.capacity()
    }
}

/// The minimum coded units that a region needs.
pub(crate) struct Window {
    pub(crate) columns: Range<usize>,
    pub(crate) rows: Range<usize>,
}

impl Window {
    /// Prepares the planes for a region of the scaled image.
    pub(crate) fn new(frame: &Frame, region: &Region, scale: Scale, planes: &mut [Plane; 4]) -> Self {
        let (eighths, mcus) = (scale.eighths(), frame.mcus());
        // Smooth upsampling reads one chroma sample (two pixels) beyond the region.
        let near = |start: usize, length: usize, size: usize, most: usize| {
            (start.saturating_sub(2) / size)..((start + length + 2).div_ceil(size)).min(most)
        };
        let columns = near(region.left, region.width, eighths * frame.h_max, mcus[0]);
        let rows = near(region.top, region.height, eighths * frame.v_max, mcus[1]);
        for (plane, c) in planes.iter_mut().zip(&frame.components) {
            // A subsampled component is scaled down less, as long as that undoes its subsampling in both directions.
            plane.size = eighths;
            while plane.size < 8
                && (frame.h_max * eighths).is_multiple_of(2 * plane.size * c.h)
                && (frame.v_max * eighths).is_multiple_of(2 * plane.size * c.v)
            {
                plane.size *= 2;
            }
            plane.stride = columns.len() * plane.size * c.h;
            (plane.left, plane.top) = (columns.start * plane.size * c.h, rows.start * plane.size * c.v);
            [plane.width, plane.height] = frame.samples(c, plane.size);
            plane.samples.resize(plane.stride * rows.len() * plane.size * c.v, 0);
        }
        Self { columns, rows }
    }

    /// A component's blocks across and down within the window, for `h` and `v` blocks in each unit.
    pub(crate) fn blocks(&self, h: usize, v: usize) -> [Range<usize>; 2] {
        [self.columns.start * h..self.columns.end * h, self.rows.start * v..self.rows.end * v]
    }
}
