//! Borders around an image.

use crate::targets::Geometry;
use crate::{Canvas, DataError, Size};

/// How many pixels are added on each side.
///
/// ```
/// use overdrive_dataload::{Padding, PaddingMode, RandomCrop};
///
/// let above = Padding { top: 8, ..Padding::default() };
/// let crop = RandomCrop::new([32, 32]).padding(above).padding_mode(PaddingMode::Reflect);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Padding {
    /// Columns on the left.
    pub left: usize,
    /// Rows above.
    pub top: usize,
    /// Columns on the right.
    pub right: usize,
    /// Rows below.
    pub bottom: usize,
}

impl From<usize> for Padding {
    /// The same on every side.
    fn from(side: usize) -> Self {
        Self::from([side; 2])
    }
}

impl From<[usize; 2]> for Padding {
    /// Torchvision's order: `[left and right, top and bottom]`.
    fn from([columns, rows]: [usize; 2]) -> Self {
        Self::from([columns, rows, columns, rows])
    }
}

impl From<[usize; 4]> for Padding {
    /// Torchvision's order: `[left, top, right, bottom]`.
    fn from([left, top, right, bottom]: [usize; 4]) -> Self {
        Self { left, top, right, bottom }
    }
}

/// What a border shows.
///
/// # Source
/// `padding_mode` of `torchvision.transforms.Pad`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[doc(alias = "padding_mode")]
pub enum PaddingMode {
    /// One colour.
    #[default]
    Constant,
    /// The pixel at the edge.
    Edge,
    /// The image mirrored at the edge, whose pixel comes once: `3 2 | 1 2 3 4 | 3 2`.
    Reflect,
    /// The image mirrored at the edge, whose pixel comes twice: `2 1 | 1 2 3 4 | 4 3`.
    Symmetric,
}

impl PaddingMode {
    /// The position within `len` pixels that position `at` shows, where the image begins at `start`.
    pub(crate) fn source(self, at: usize, start: usize, len: usize) -> Option<usize> {
        let offset = at as i64 - start as i64;
        let last = len as i64 - 1;
        // Pixels beyond the second border repeat: the image and its mirror image are one period.
        let mirrored = |period: i64, past: i64| {
            let within = offset.rem_euclid(period.max(1));
            if within > last { past - within } else { within }
        };
        let source = match self {
            _ if (0..=last).contains(&offset) => offset,
            Self::Constant => return None,
            Self::Edge => offset.clamp(0, last),
            Self::Reflect => mirrored(2 * last, 2 * last),
            Self::Symmetric => mirrored(2 * last + 2, 2 * last + 1),
        };
        Some(source as usize)
    }
}

impl Padding {
    /// The size of an image with this border.
    pub(crate) fn around(self, Size { height, width }: Size) -> Size {
        let sum = |parts: [usize; 3]| parts.into_iter().fold(0, usize::saturating_add);
        Size { height: sum([self.top, height, self.bottom]), width: sum([self.left, width, self.right]) }
    }

    /// Adds the border; `fill` is its colour where the mode is constant.
    pub(super) fn apply(self, canvas: &mut Canvas<'_>, mode: PaddingMode, fill: [u8; 3]) -> Result<(), DataError> {
        let (height, width) = (canvas.height(), canvas.width());
        let from = Size { height, width };
        let size = self.around(from);
        let [red, green, blue] = fill;
        canvas.change_target(&Geometry::Pad { padding: self, mode, from })?;
        canvas.redraw(size, |from, to| {
            let columns: Vec<_> = (0..size.width).map(|column| mode.source(column, self.left, width)).collect();
            for (row, to) in to.chunks_exact_mut(size.width).enumerate() {
                let from = mode.source(row, self.top, height).map(|row| &from[row * width..][..width]);
                for (to, column) in to.iter_mut().zip(&columns) {
                    *to = from.zip(*column).map_or([red, green, blue, 0], |(from, column)| from[column]);
                }
            }
        })
    }
}
