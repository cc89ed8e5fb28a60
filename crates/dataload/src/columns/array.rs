//! The rows of a column in plain memory, which threads can share.

use std::ops::Range;

use super::element::Element;
use super::words::{Spare, Words};
use crate::DataError;

/// The values of a column, and the offsets of its lists and strings.
#[derive(Clone, Debug)]
pub(crate) struct Array {
    pub(crate) element: Element,
    pub(crate) rows: usize,
    /// How many values each row has where rows are lists of one length, without offsets.
    pub(crate) per_row: Option<usize>,
    /// The offsets of each level of lists, outermost first: where each list begins among its elements, and the end of
    /// the last one. Strings are lists of bytes.
    pub(crate) offsets: Vec<Vec<i64>>,
    pub(crate) values: Words,
}

/// Values whose number is only known after reading, and the offsets of the lists and strings that they form.
#[derive(Default)]
pub(crate) struct Grown {
    pub(crate) offsets: Vec<Vec<i64>>,
    pub(crate) values: Vec<u8>,
}

impl Array {
    /// Joins the pieces decoded from each row group, in order.
    pub(crate) fn from_pieces(element: Element, pieces: Vec<Grown>, spare: &Spare) -> Result<Self, DataError> {
        let parts: Vec<_> = pieces.iter().map(|piece| (piece.offsets.as_slice(), piece.values.as_slice())).collect();
        Self::from_parts(element, &parts, spare)
    }

    /// The same for pieces of offsets and values.
    fn from_parts(element: Element, parts: &[(&[Vec<i64>], &[u8])], spare: &Spare) -> Result<Self, DataError> {
        let mut values = spare.take(parts.iter().map(|(_, values)| values.len()).sum())?;
        let mut rest = values.bytes_mut();
        let levels = parts.first().map_or(0, |(offsets, _)| offsets.len());
        let mut offsets = vec![vec![0]; levels];
        for (piece, values) in parts {
            let (here, tail) = rest.split_at_mut(values.len());
            here.copy_from_slice(values);
            rest = tail;
            for (offsets, piece) in offsets.iter_mut().zip(*piece) {
                let before = offsets[offsets.len() - 1];
                offsets.extend(piece.iter().skip(1).map(|offset| before + offset));
            }
        }
        let rows = offsets.first().map_or(0, |offsets| offsets.len() - 1);
        Ok(Self { element, rows, per_row: None, offsets, values })
    }

    /// An array without rows.
    pub(crate) fn empty(element: Element, levels: usize) -> Self {
        Self { element, rows: 0, per_row: None, offsets: vec![vec![0]; levels], values: Words::default() }
    }

    /// The common length of all lists, for a column of one level of lists; otherwise the first list of another length,
    /// as (row, length).
    pub(crate) fn uniform(&self) -> Result<i64, (usize, i64)> {
        let [offsets] = self.offsets.as_slice() else { return Err((0, 0)) };
        let mut lengths = offsets.windows(2).map(|pair| pair[1] - pair[0]).enumerate();
        let Some((_, first)) = lengths.next() else { return Ok(0) };
        lengths.find(|(_, length)| *length != first).map_or(Ok(first), Err)
    }

    /// The rows at `rows`, which are below [`rows`](Self::rows).
    pub(crate) fn gather(&self, rows: &[u32]) -> Result<Self, DataError> {
        let (element, per_row) = (self.element, self.per_row);
        let stride = per_row.unwrap_or(1) * element.bytes();
        if self.offsets.is_empty() {
            let mut values = Words::new(rows.len() * stride)?;
            gather_fixed(self.values.bytes(), stride, rows, values.bytes_mut());
            return Ok(Self { element, rows: rows.len(), per_row, offsets: Vec::new(), values });
        }
        // Level by level, ranges of lists become ranges of their elements.
        let mut ranges: Vec<Range<usize>> = rows.iter().map(|&row| row as usize..row as usize + 1).collect();
        let mut offsets = Vec::with_capacity(self.offsets.len());
        for level in &self.offsets {
            let mut gathered = vec![0];
            for range in &mut ranges {
                let (start, end) = (level[range.start], level[range.end]);
                let before = gathered[gathered.len() - 1] - start;
                gathered.extend(level[range.start + 1..=range.end].iter().map(|offset| before + offset));
                *range = start as usize..end as usize;
            }
            offsets.push(gathered);
        }
        let bytes = element.bytes();
        let mut values = Words::new(ranges.iter().map(|range| range.len() * bytes).sum())?;
        let (all, mut rest) = (self.values.bytes(), values.bytes_mut());
        for range in ranges {
            let (here, tail) = rest.split_at_mut(range.len() * bytes);
            here.copy_from_slice(&all[range.start * bytes..range.end * bytes]);
            rest = tail;
        }
        Ok(Self { element, rows: rows.len(), per_row, offsets, values })
    }

    /// Appends another array of the same column.
    pub(crate) fn join(self, next: Self) -> Result<Self, DataError> {
        Self::concat(&[self, next])
    }

    /// Joins arrays of the same column, of which there is at least one.
    pub(crate) fn concat(arrays: &[Self]) -> Result<Self, DataError> {
        let first = arrays.first().ok_or(DataError::EmptyBatch)?;
        let parts: Vec<_> = arrays.iter().map(|array| (array.offsets.as_slice(), array.values.bytes())).collect();
        let joined = Self::from_parts(first.element, &parts, &Spare::default())?;
        Ok(Self { rows: arrays.iter().map(|array| array.rows).sum(), per_row: first.per_row, ..joined })
    }
}

fn gather_fixed(values: &[u8], stride: usize, rows: &[u32], out: &mut [u8]) {
    match stride {
        1 => gather_chunks::<1>(values, rows, out),
        2 => gather_chunks::<2>(values, rows, out),
        4 => gather_chunks::<4>(values, rows, out),
        8 => gather_chunks::<8>(values, rows, out),
        0 => {}
        _ => out.chunks_exact_mut(stride).zip(rows).for_each(|(out, &row)| {
            out.copy_from_slice(&values[row as usize * stride..(row as usize + 1) * stride]);
        }),
    }
}

fn gather_chunks<const N: usize>(values: &[u8], rows: &[u32], out: &mut [u8]) {
    let ((values, _), (out, _)) = (values.as_chunks::<N>(), out.as_chunks_mut::<N>());
    out.iter_mut().zip(rows).for_each(|(out, &row)| *out = values[row as usize]);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(texts: &[&[&str]]) -> Grown {
        let (mut lists, mut ends, mut values) = (vec![0], vec![0], Vec::new());
        for list in texts {
            for text in *list {
                values.extend_from_slice(text.as_bytes());
                ends.push(values.len() as i64);
            }
            lists.push(ends.len() as i64 - 1);
        }
        Grown { offsets: vec![lists, ends], values }
    }

    #[test]
    fn lists_of_texts_are_joined_and_gathered() {
        let pieces = vec![bytes(&[&["ab", ""], &[]]), bytes(&[]), bytes(&[&["c"], &["d", "ef", "g"]])];
        let array = Array::from_pieces(Element::Bytes, pieces, &Spare::default()).unwrap();
        assert_eq!((array.rows, &array.offsets[0]), (4, &vec![0, 2, 2, 3, 6]));
        assert_eq!((&array.offsets[1], array.values.bytes()), (&vec![0, 2, 2, 3, 4, 6, 7], &b"abcdefg"[..]));
        let some = array.gather(&[3, 1, 0, 3]).unwrap();
        assert_eq!((&some.offsets[0], &some.offsets[1]), (&vec![0, 3, 3, 5, 8], &vec![0, 1, 3, 4, 6, 6, 7, 9, 10]));
        assert_eq!(some.values.bytes(), b"defgabdefg");
        let joined = array.gather(&[0]).unwrap().join(array.gather(&[1, 2, 3]).unwrap()).unwrap();
        assert_eq!((joined.rows, joined.offsets, joined.values.bytes()), (4, array.offsets, array.values.bytes()));
    }

    #[test]
    fn rows_of_every_width_are_gathered() {
        for stride in [1, 2, 3, 4, 8, 12] {
            let values: Vec<u8> = (0..5 * stride as u8).collect();
            let mut out = vec![0; 3 * stride];
            gather_fixed(&values, stride, &[4, 0, 2], &mut out);
            let expected: Vec<u8> =
                [4, 0, 2].iter().flat_map(|row| &values[row * stride..(row + 1) * stride]).copied().collect();
            assert_eq!(out, expected);
        }
    }
}
