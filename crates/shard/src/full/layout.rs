//! How a parameter's rows are parted over ranks.

use std::ops::Range;

use overdrive_core::{Rows, StateError};
use tch::Kind;

use crate::packing::LARGE;

/// Offsets of parameters within what is sent are multiples of so many bytes, so that they can be of any dtype.
const ALIGNMENT: i64 = 16;

/// A parameter on dimension 0: each rank has as many rows, the last ones fewer or none. What is sent is padded to equal
/// parts.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Layout {
    pub(super) shape: Vec<i64>,
    pub(super) ranks: i64,
    pub(super) rank: i64,
}

impl Layout {
    pub(super) fn new(shape: Vec<i64>, rank: usize, ranks: usize) -> Self {
        Self { shape, ranks: ranks as i64, rank: rank as i64 }
    }

    fn rows(&self) -> i64 {
        self.shape.first().copied().unwrap_or(0)
    }

    /// The rows of a full part.
    fn part(&self) -> i64 {
        (self.rows() + self.ranks - 1) / self.ranks
    }

    /// Elements of a row.
    fn width(&self) -> i64 {
        self.shape.iter().skip(1).product()
    }

    /// Elements of a full part, as many as each rank sends.
    pub(super) fn part_numel(&self) -> i64 {
        self.part() * self.width()
    }

    /// Bytes of a part in what is sent.
    pub(super) fn part_bytes(&self, kind: Kind) -> i64 {
        let bytes = self.part_numel() * kind.elt_size_in_bytes() as i64;
        (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT
    }

    /// The first row of this rank, and how many it has.
    pub(super) fn own_rows(&self) -> (i64, i64) {
        let first = (self.rank * self.part()).min(self.rows());
        (first, self.part().min(self.rows() - first))
    }

    /// The rows of this rank.
    pub(super) fn own_range(&self) -> Range<i64> {
        let (first, rows) = self.own_rows();
        first..first + rows
    }

    /// The same as states tell them.
    pub(super) fn rows_of_whole(&self) -> Rows {
        Rows { first: self.own_rows().0, whole: self.shape.clone() }
    }

    /// The rows of this rank of a saved tensor, whose whole should be the parameter's.
    pub(super) fn range_of(&self, key: &str, whole: &[i64]) -> Result<Range<i64>, StateError> {
        if self.shape == whole {
            return Ok(self.own_range());
        }
        let (expected, found) = (&self.shape, whole);
        let (expected, found) = (format!("a tensor of shape {expected:?}"), format!("one of shape {found:?}"));
        Err(StateError::Mismatch { key: key.to_owned(), expected, found })
    }

    /// Elements of this rank.
    pub(super) fn own_numel(&self) -> i64 {
        self.own_rows().1 * self.width()
    }

    /// The shape of this rank's part.
    pub(super) fn own_shape(&self) -> Vec<i64> {
        self.with_rows(self.own_rows().1)
    }

    /// The parameter's shape with so many rows.
    pub(super) fn with_rows(&self, rows: i64) -> Vec<i64> {
        std::iter::once(rows).chain(self.shape.iter().skip(1).copied()).collect()
    }

    /// The shape with padding: all ranks' parts.
    pub(super) fn padded_shape(&self) -> Vec<i64> {
        self.with_rows(self.part() * self.ranks)
    }

    /// Elements with padding.
    pub(super) fn padded_numel(&self) -> i64 {
        self.part_numel() * self.ranks
    }

    /// Whether it is exchanged by itself, in this dtype. The same on all ranks.
    pub(super) fn is_large(&self, kind: Kind) -> bool {
        self.padded_numel() as usize * kind.elt_size_in_bytes() >= LARGE
    }

    /// How many ranks have full parts, and the elements of the rank after them.
    pub(super) fn full_parts(&self) -> (i64, i64) {
        match self.part() {
            0 => (0, 0),
            part => (self.rows() / part, self.rows() % part * self.width()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_parted_as_pytorch_chunks_them() {
        let rows = |rows: i64, ranks: usize| -> Vec<i64> {
            (0..ranks).map(|rank| Layout::new(vec![rows, 2], rank, ranks).own_rows().1).collect()
        };
        assert_eq!(rows(8, 4), [2, 2, 2, 2]);
        assert_eq!(rows(5, 4), [2, 2, 1, 0], "torch.chunk(torch.zeros(5, 2), 4)");
        assert_eq!(rows(6, 4), [2, 2, 2, 0]);
        assert_eq!(rows(2, 4), [1, 1, 0, 0], "fewer rows than ranks");
        assert_eq!(rows(3, 1), [3]);
    }

    #[test]
    fn what_is_sent_is_padded_and_aligned() {
        let layout = Layout::new(vec![5, 3], 2, 4);
        assert_eq!((layout.part_numel(), layout.own_numel(), layout.padded_numel()), (6, 3, 24));
        assert_eq!(layout.part_bytes(Kind::Float), 32);
        assert_eq!((layout.own_shape(), layout.padded_shape()), (vec![1, 3], vec![8, 3]));
        assert_eq!(layout.full_parts(), (2, 3));
        assert_eq!(Layout::new(vec![8, 3], 0, 4).full_parts(), (4, 0));
    }
}
