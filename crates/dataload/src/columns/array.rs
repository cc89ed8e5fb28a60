//! The rows of a column in plain memory, which threads can share.

use std::ops::Range;

use super::element::Element;
use super::ragged::uniform;
use super::words::Words;
use crate::DataError;

/// The values of a column, and the offsets of its lists and strings.
#[derive(Debug)]
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

/// A row of one of several arrays.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) array: u32,
    pub(crate) row: u32,
}

/// A row of the first array, which may be the only one.
impl From<u32> for Place {
    fn from(row: u32) -> Self {
        Self { array: 0, row }
    }
}

impl Array {
    /// Lists or strings with these offsets and values.
    pub(crate) fn of_lists(element: Element, offsets: Vec<Vec<i64>>, values: Words) -> Self {
        let rows = offsets.first().map_or(0, |offsets| offsets.len().saturating_sub(1));
        Self { element, rows, per_row: None, offsets, values }
    }

    /// An array without rows.
    pub(crate) fn empty(element: Element, levels: usize) -> Self {
        Self { element, rows: 0, per_row: None, offsets: vec![vec![0]; levels], values: Words::default() }
    }

    /// The common length of all lists, for a column of one level of lists; otherwise the first list of another length,
    /// as (row, length).
    pub(crate) fn uniform(&self) -> Result<i64, (usize, i64)> {
        match self.offsets.as_slice() {
            [offsets] => uniform(offsets),
            _ => Err((0, 0)),
        }
    }

    /// Rows of several arrays of one column, in the order of `rows`, in the memory that `take` gives for so many bytes if
    /// each has equally many. There is at least one array, and no row is beyond its array.
    pub(crate) fn gather<R: Copy + Into<Place>>(
        arrays: &[Self],
        rows: &[R],
        take: impl FnOnce(usize) -> Result<Words, DataError>,
    ) -> Result<Self, DataError> {
        let first = arrays.first().ok_or(DataError::EmptyBatch)?;
        if !first.offsets.is_empty() {
            let ranges: Vec<_> = places(arrays, rows).map(|(array, row)| (array, row..row + 1)).collect();
            return Self::copied(if ranges.is_empty() { vec![(first, 0..0)] } else { ranges }, false);
        }
        let stride = first.stride();
        let mut values = take(rows.len().saturating_mul(stride))?;
        gather_fixed(arrays, stride, rows, values.bytes_mut());
        Ok(Self { element: first.element, rows: rows.len(), per_row: first.per_row, offsets: Vec::new(), values })
    }

    /// Ranges of rows of arrays of one column, at least one, copied one behind the other: to pinned memory when `pinned`,
    /// if they become a tensor.
    pub(crate) fn copied(mut ranges: Vec<(&Self, Range<usize>)>, pinned: bool) -> Result<Self, DataError> {
        let &(first, _) = ranges.first().ok_or(DataError::EmptyBatch)?;
        let (element, per_row) = (first.element, first.per_row);
        let pinned = pinned && !(first.offsets.len() == 1 && element == Element::Bytes);
        let rows = ranges.iter().map(|(_, range)| range.len()).sum();
        // Level by level, ranges of lists become ranges of their elements.
        let mut offsets = Vec::with_capacity(first.offsets.len());
        for level in 0..first.offsets.len() {
            let mut gathered = Vec::with_capacity(1 + ranges.iter().map(|(_, range)| range.len()).sum::<usize>());
            gathered.push(0);
            for (array, range) in &mut ranges {
                let level = &array.offsets[level];
                let (start, end) = (level[range.start], level[range.end]);
                let before = gathered[gathered.len() - 1] - start;
                gathered.extend(level[range.start + 1..=range.end].iter().map(|offset| before + offset));
                *range = start as usize..end as usize;
            }
            offsets.push(gathered);
        }
        let stride = first.stride();
        let mut values = Words::with(ranges.iter().map(|(_, range)| range.len() * stride).sum(), pinned)?;
        let mut rest = values.bytes_mut();
        for (array, range) in ranges {
            let (here, tail) = rest.split_at_mut(range.len() * stride);
            here.copy_from_slice(&array.values.bytes()[range.start * stride..range.end * stride]);
            rest = tail;
        }
        Ok(Self { element, rows, per_row, offsets, values })
    }

    /// Joins arrays of the same column, of which there is at least one; a single one is not copied.
    pub(crate) fn concat(mut arrays: Vec<Self>) -> Result<Self, DataError> {
        match arrays.len() {
            1 => arrays.pop().ok_or(DataError::EmptyBatch),
            _ => Self::copied(arrays.iter().map(|array| (array, 0..array.rows)).collect(), false),
        }
    }

    /// The bytes of a row, or of an element of lists.
    fn stride(&self) -> usize {
        self.per_row.unwrap_or(1) * self.element.bytes()
    }
}

fn places<'a, R: Copy + Into<Place>>(arrays: &'a [Array], rows: &'a [R]) -> impl Iterator<Item = (&'a Array, usize)> {
    rows.iter().map(|&row| {
        let Place { array, row } = row.into();
        (&arrays[array as usize], row as usize)
    })
}

fn gather_fixed<R: Copy + Into<Place>>(arrays: &[Array], stride: usize, rows: &[R], out: &mut [u8]) {
    match stride {
        1 => gather_chunks::<1, R>(arrays, rows, out),
        2 => gather_chunks::<2, R>(arrays, rows, out),
        4 => gather_chunks::<4, R>(arrays, rows, out),
        8 => gather_chunks::<8, R>(arrays, rows, out),
        0 => {}
        _ => out.chunks_exact_mut(stride).zip(places(arrays, rows)).for_each(|(out, (array, row))| {
            out.copy_from_slice(&array.values.bytes()[row * stride..][..stride]);
        }),
    }
}

fn gather_chunks<const N: usize, R: Copy + Into<Place>>(arrays: &[Array], rows: &[R], out: &mut [u8]) {
    let values: Vec<&[[u8; N]]> = arrays.iter().map(|array| array.values.bytes().as_chunks().0).collect();
    let rows = out.as_chunks_mut::<N>().0.iter_mut().zip(rows);
    match values[..] {
        [values] => rows.for_each(|(out, &row)| *out = values[row.into().row as usize]),
        _ => rows.for_each(|(out, &row)| {
            let Place { array, row } = row.into();
            *out = values[array as usize][row as usize];
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(lists: &[&[&str]]) -> Array {
        let (mut starts, mut ends, mut values) = (vec![0], vec![0], Words::default());
        for list in lists {
            for text in *list {
                values.extend(text.len()).unwrap().copy_from_slice(text.as_bytes());
                ends.push(values.bytes().len() as i64);
            }
            starts.push(ends.len() as i64 - 1);
        }
        Array::of_lists(Element::Bytes, vec![starts, ends], values)
    }

    #[test]
    fn lists_of_texts_are_joined_and_gathered() {
        let arrays = || vec![texts(&[&["ab", ""], &[]]), texts(&[]), texts(&[&["c"], &["d", "ef", "g"]])];
        let array = Array::concat(arrays()).unwrap();
        assert_eq!((array.rows, &array.offsets[0]), (4, &vec![0, 2, 2, 3, 6]));
        assert_eq!((&array.offsets[1], array.values.bytes()), (&vec![0, 2, 2, 3, 4, 6, 7], &b"abcdefg"[..]));
        // From the joined array, from those that were joined, and ranges of both.
        let (joined, apart) = ([array], arrays());
        let (place, memory) = (|array, row| Place { array, row }, |_| unreachable!("for lists"));
        let gathered = [
            Array::gather(&joined, &[3_u32, 1, 0, 3], memory),
            Array::gather(&apart, &[place(2, 1), place(0, 1), place(0, 0), place(2, 1)], memory),
            Array::copied(vec![(&apart[2], 1..2), (&joined[0], 1..2), (&apart[0], 0..1), (&joined[0], 3..4)], false),
        ];
        for some in gathered.map(Result::unwrap) {
            assert_eq!((some.rows, &some.offsets[0]), (4, &vec![0, 3, 3, 5, 8]));
            assert_eq!(
                (&some.offsets[1], some.values.bytes()),
                (&vec![0, 1, 3, 4, 6, 6, 7, 9, 10], &b"defgabdefg"[..])
            );
        }
    }

    #[test]
    fn a_single_array_is_joined_where_it_is() {
        let array = texts(&[&["abc"]]);
        let memory = array.values.bytes().as_ptr();
        assert_eq!(Array::concat(vec![array]).unwrap().values.bytes().as_ptr(), memory);
        assert!(matches!(Array::concat(Vec::new()), Err(DataError::EmptyBatch)));
    }

    #[test]
    fn rows_of_one_length_are_gathered_from_several_arrays() {
        let array = |values: &[u8]| Array {
            element: Element::Uint8,
            rows: values.len() / 2,
            per_row: Some(2),
            offsets: Vec::new(),
            values: {
                let mut words = Words::new(values.len()).unwrap();
                words.bytes_mut().copy_from_slice(values);
                words
            },
        };
        let arrays = [array(&[0, 1, 2, 3]), array(&[]), array(&[4, 5])];
        let places = [(2, 0), (0, 0), (0, 1)].map(|(array, row)| Place { array, row });
        let rows = Array::gather(&arrays, &places, Words::new).unwrap();
        assert_eq!((rows.rows, rows.per_row, rows.values.bytes()), (3, Some(2), &[4, 5, 0, 1, 2, 3][..]));
        let rows = Array::copied(vec![(&arrays[2], 0..1), (&arrays[1], 0..0), (&arrays[0], 1..2)], false).unwrap();
        assert_eq!((rows.rows, rows.per_row, rows.values.bytes()), (2, Some(2), &[4, 5, 2, 3][..]));
    }

    #[test]
    fn rows_of_every_width_are_gathered() {
        for stride in [1, 2, 3, 4, 8, 12] {
            let values: Vec<u8> = (0..5 * stride as u8).collect();
            let array = |values: &[u8]| {
                let mut words = Words::new(values.len()).unwrap();
                words.bytes_mut().copy_from_slice(values);
                Array { element: Element::Uint8, rows: 0, per_row: None, offsets: Vec::new(), values: words }
            };
            let expected: Vec<u8> =
                [4, 0, 2].iter().flat_map(|row| &values[row * stride..(row + 1) * stride]).copied().collect();
            let mut out = vec![0; 3 * stride];
            gather_fixed(&[array(&values)], stride, &[4_u32, 0, 2], &mut out);
            assert_eq!(out, expected);
            // The same rows of two arrays.
            let (apart, place) = (values.split_at(3 * stride), |array, row| Place { array, row });
            let apart = [array(apart.0), array(apart.1)];
            out.fill(0);
            gather_fixed(&apart, stride, &[place(1, 1), place(0, 0), place(0, 2)], &mut out);
            assert_eq!(out, expected);
        }
    }
}
