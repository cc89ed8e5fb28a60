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
    /// Which rows are null, as bools, where that is asked for.
    pub(crate) mask: Option<Box<Array>>,
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

#[cfg(test)]
thread_local! {
    /// How many bytes of values this thread has copied from arrays to others.
    pub(crate) static COPIED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

impl Array {
    /// One value for each row.
    pub(crate) fn of_values(element: Element, rows: usize, values: Words) -> Self {
        Self { element, rows, per_row: None, offsets: Vec::new(), values, mask: None }
    }

    /// Bools, one for each row.
    pub(crate) fn of_bools(bools: &[bool]) -> Result<Self, DataError> {
        let mut values = Words::new(bools.len())?;
        values.bytes_mut().copy_from_slice(bytemuck::cast_slice(bools));
        Ok(Self::of_values(Element::Bool, bools.len(), values))
    }

    /// Lists or strings with these offsets and values.
    pub(crate) fn of_lists(element: Element, offsets: Vec<Vec<i64>>, values: Words) -> Self {
        let rows = offsets.first().map_or(0, |offsets| offsets.len().saturating_sub(1));
        Self { element, rows, per_row: None, offsets, values, mask: None }
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
        arrays: &[&Self],
        rows: &[R],
        take: impl FnOnce(usize) -> Result<Words, DataError>,
    ) -> Result<Self, DataError> {
        let &first = arrays.first().ok_or(DataError::EmptyBatch)?;
        if !first.offsets.is_empty() {
            let ranges: Vec<_> = places(arrays, rows).map(|(array, row)| (array, row..row + 1)).collect();
            return Self::copied(if ranges.is_empty() { vec![(first, 0..0)] } else { ranges }, false);
        }
        let stride = first.stride();
        let mut values = take(rows.len().saturating_mul(stride))?;
        #[cfg(test)]
        COPIED.set(COPIED.get() + values.bytes().len());
        gather_fixed(arrays, stride, rows, values.bytes_mut());
        let masks: Option<Vec<&Self>> = arrays.iter().map(|array| array.mask.as_deref()).collect();
        let mask = masks.map(|masks| Self::gather(&masks, rows, Words::new).map(Box::new)).transpose()?;
        let gathered = Self::of_values(first.element, rows.len(), values);
        Ok(Self { per_row: first.per_row, mask, ..gathered })
    }

    /// Ranges of rows of arrays of one column, at least one, copied one behind the other: to pinned memory when `pinned`,
    /// if they become a tensor.
    pub(crate) fn copied(mut ranges: Vec<(&Self, Range<usize>)>, pinned: bool) -> Result<Self, DataError> {
        let &(first, _) = ranges.first().ok_or(DataError::EmptyBatch)?;
        let (element, per_row) = (first.element, first.per_row);
        let masks = ranges.iter().map(|(array, range)| Some((array.mask.as_deref()?, range.clone())));
        let masks: Option<Vec<_>> = masks.collect();
        let mask = masks.map(|masks| Self::copied(masks, pinned).map(Box::new)).transpose()?;
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
        #[cfg(test)]
        COPIED.set(COPIED.get() + values.bytes().len());
        let mut rest = values.bytes_mut();
        for (array, range) in ranges {
            let (here, tail) = rest.split_at_mut(range.len() * stride);
            here.copy_from_slice(&array.values.bytes()[range.start * stride..range.end * stride]);
            rest = tail;
        }
        Ok(Self { element, rows, per_row, offsets, values, mask })
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

fn places<'a, R: Copy + Into<Place>>(
    arrays: &'a [&'a Array],
    rows: &'a [R],
) -> impl Iterator<Item = (&'a Array, usize)> {
    rows.iter().map(|&row| {
        let Place { array, row } = row.into();
        (arrays[array as usize], row as usize)
    })
}

fn gather_fixed<R: Copy + Into<Place>>(arrays: &[&Array], stride: usize, rows: &[R], out: &mut [u8]) {
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

fn gather_chunks<const N: usize, R: Copy + Into<Place>>(arrays: &[&Array], rows: &[R], out: &mut [u8]) {
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
        let arrays = || [texts(&[&["ab", ""], &[]]), texts(&[]), texts(&[&["c"], &["d", "ef", "g"]])];
        let array = Array::concat(arrays().into()).unwrap();
        assert_eq!((array.rows, &array.offsets[0]), (4, &vec![0, 2, 2, 3, 6]));
        assert_eq!((&array.offsets[1], array.values.bytes()), (&vec![0, 2, 2, 3, 4, 6, 7], &b"abcdefg"[..]));
        // From the joined array, from those that were joined, and ranges of both.
        let (joined, apart) = ([array], arrays());
        let (place, memory) = (|array, row| Place { array, row }, |_| unreachable!("for lists"));
        let gathered = [
            Array::gather(&[&joined[0]], &[3_u32, 1, 0, 3], memory),
            Array::gather(&apart.each_ref(), &[place(2, 1), place(0, 1), place(0, 0), place(2, 1)], memory),
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
        let array = |values: &[u8]| {
            let mut words = Words::new(values.len()).unwrap();
            words.bytes_mut().copy_from_slice(values);
            Array { per_row: Some(2), ..Array::of_values(Element::Uint8, values.len() / 2, words) }
        };
        let arrays = [array(&[0, 1, 2, 3]), array(&[]), array(&[4, 5])];
        let places = [(2, 0), (0, 0), (0, 1)].map(|(array, row)| Place { array, row });
        let rows = Array::gather(&arrays.each_ref(), &places, Words::new).unwrap();
        assert_eq!((rows.rows, rows.per_row, rows.values.bytes()), (3, Some(2), &[4, 5, 0, 1, 2, 3][..]));
        let rows = Array::copied(vec![(&arrays[2], 0..1), (&arrays[1], 0..0), (&arrays[0], 1..2)], false).unwrap();
        assert_eq!((rows.rows, rows.per_row, rows.values.bytes()), (2, Some(2), &[4, 5, 2, 3][..]));
    }

    #[test]
    fn masks_go_with_their_rows() -> Result<(), DataError> {
        let masked =
            |array: Array, bools: &[bool]| Array { mask: Some(Box::new(Array::of_bools(bools).unwrap())), ..array };
        let numbers = |bytes: usize| Array::of_values(Element::Uint8, bytes, Words::new(bytes).unwrap());
        let place = |array, row| Place { array, row };
        for [one, two] in [[numbers(2), numbers(1)], [texts(&[&["a"], &[]]), texts(&[&["b"]])]] {
            let (one, two) = (masked(one, &[false, true]), masked(two, &[true]));
            let gathered = Array::gather(&[&one, &two], &[place(1, 0), place(0, 0), place(0, 1)], Words::new)?;
            assert_eq!(gathered.mask.unwrap().values.bytes(), [1, 0, 1]);
            let copied = Array::copied(vec![(&one, 1..2), (&one, 0..1)], false)?;
            assert_eq!(copied.mask.unwrap().values.bytes(), [1, 0]);
            assert_eq!(Array::concat(vec![one, two])?.mask.unwrap().values.bytes(), [0, 1, 1]);
        }
        Ok(())
    }

    #[test]
    fn rows_of_every_width_are_gathered() {
        for stride in [1, 2, 3, 4, 8, 12] {
            let values: Vec<u8> = (0..5 * stride as u8).collect();
            let array = |values: &[u8]| {
                let mut words = Words::new(values.len()).unwrap();
                words.bytes_mut().copy_from_slice(values);
                Array::of_values(Element::Uint8, 0, words)
            };
            let expected: Vec<u8> =
                [4, 0, 2].iter().flat_map(|row| &values[row * stride..(row + 1) * stride]).copied().collect();
            let mut out = vec![0; 3 * stride];
            gather_fixed(&[&array(&values)], stride, &[4_u32, 0, 2], &mut out);
            assert_eq!(out, expected);
            // The same rows of two arrays.
            let (apart, place) = (values.split_at(3 * stride), |array, row| Place { array, row });
            let apart = [array(apart.0), array(apart.1)];
            out.fill(0);
            gather_fixed(&apart.each_ref(), stride, &[place(1, 1), place(0, 0), place(0, 2)], &mut out);
            assert_eq!(out, expected);
        }
    }
}
