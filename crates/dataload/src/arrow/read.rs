//! Reads rows of an Arrow column, which may be nested, into flat arrays. It descends from the outermost array to the
//! values.
//!
//! Files may be damaged, so every length and offset is checked before memory is allocated for it.

use std::ops::Range;

use super::layout::{Leaf, LevelKind};
use super::node::Node;
use crate::DataError;
use crate::columns::{Array, FieldKind, OnNull};

/// More elements than fit into any memory, so offsets that claim more are damaged.
const MOST_ELEMENTS: i64 = 1 << 48;

/// Why rows could not be read. `row` counts from the start of the record batch.
#[derive(Debug)]
pub(super) enum ReadError {
    Null {
        row: usize,
    },
    Malformed {
        row: usize,
        expected: &'static str,
    },
    TooLarge {
        bytes: u64,
    },
    /// The column has this type, which is not supported.
    Unsupported(String),
    Other(DataError),
}

impl From<DataError> for ReadError {
    fn from(error: DataError) -> Self {
        Self::Other(error)
    }
}

/// How to read a column.
#[derive(Clone, Copy)]
pub(super) struct Reader<'a> {
    pub(super) leaf: &'a Leaf,
    pub(super) nulls: &'a OnNull,
    /// The dictionary, if the column is dictionary-encoded.
    pub(super) dictionary: Option<&'a Array>,
    /// How many bytes the values may take at most.
    pub(super) limit: u64,
}

/// The state of the descent at one level of nesting: which elements of the current array are needed, and the offsets
/// and nulls of the levels above.
pub(super) struct Walk<'a> {
    pub(super) reader: Reader<'a>,
    nodes: &'a [Node<'a>],
    first_row: usize,
    /// The needed elements, in order.
    pub(super) ranges: Vec<Range<usize>>,
    /// Which of the needed elements are null; empty if none is.
    pub(super) missing: Vec<bool>,
    /// For each level of lists so far: where the lists begin among the elements of the next level.
    offsets: Vec<Vec<i64>>,
    /// How many values a row has, if the column has fixed-size lists only.
    per_row: Option<usize>,
    /// Which rows are null, where nulls are masked.
    mask: Option<Vec<bool>>,
}

impl<'a> Reader<'a> {
    /// The values of `rows`, with a mask where nulls are masked. `nodes` are the arrays on the way to the values, the
    /// outermost first.
    pub(super) fn read(self, nodes: &[Node<'_>], rows: Range<usize>) -> Result<Array, ReadError> {
        self.read_beside(nodes, rows, false).map(|(array, _)| array)
    }

    /// The same, with an array that has no values if these may stay `in_place` and can: the first so many bytes of their
    /// buffer.
    pub(super) fn read_beside(
        self,
        nodes: &[Node<'_>],
        rows: Range<usize>,
        in_place: bool,
    ) -> Result<(Array, Option<usize>), ReadError> {
        let mut walk = Walk {
            reader: self,
            nodes,
            first_row: rows.start,
            ranges: vec![rows.clone()],
            missing: Vec::new(),
            offsets: Vec::new(),
            per_row: None,
            mask: None,
        };
        if let FieldKind::Unsupported(found) = self.leaf.field.kind() {
            return Err(ReadError::Unsupported(found.clone()));
        }
        for (depth, (level, node)) in self.leaf.levels.iter().zip(nodes).enumerate() {
            walk.mark_nulls(node)?;
            match &level.kind {
                LevelKind::Struct => walk.shift(node.offset),
                LevelKind::List { wide } => walk.lists(node, *wide)?,
                LevelKind::FixedList(length) => walk.fixed_lists(depth, node, *length)?,
                LevelKind::Values(stored) => {
                    let stay = if in_place { walk.bytes_in_place(stored, node) } else { None };
                    let (values, text) = match stay {
                        Some(_) => Default::default(),
                        None => walk.values(stored, node)?,
                    };
                    walk.set_mask();
                    walk.offsets.extend(text);
                    let (element, per_row) = (stored.element(), walk.per_row);
                    let mask = walk.mask.map(|mask| Array::of_bools(&mask).map(Box::new)).transpose()?;
                    let array = Array { element, rows: rows.len(), per_row, offsets: walk.offsets, values, mask };
                    return Ok((array, stay));
                }
                LevelKind::Unsupported(_) => break,
            }
        }
        Err(ReadError::Malformed { row: rows.start, expected: "values of a supported type" })
    }
}

impl Walk<'_> {
    pub(super) fn count(&self) -> usize {
        self.ranges.iter().map(Range::len).sum()
    }

    fn end(&self) -> usize {
        self.ranges.iter().map(|range| range.end).max().unwrap_or(0)
    }

    /// The row that an element belongs to.
    fn row_of(&self, element: usize) -> usize {
        let list_of = |element: usize, offsets: &Vec<i64>| {
            offsets.partition_point(|&start| start <= element as i64).saturating_sub(1)
        };
        self.first_row + self.offsets.iter().rev().fold(element / self.per_row.unwrap_or(1).max(1), list_of)
    }

    pub(super) fn malformed(&self, element: usize, expected: &'static str) -> ReadError {
        ReadError::Malformed { row: self.row_of(element), expected }
    }

    pub(super) fn is_missing(&self, element: usize) -> bool {
        self.missing.get(element).copied().unwrap_or(false)
    }

    /// Marks the null elements, or fails if null is not allowed here. Also checks that the array has all elements.
    fn mark_nulls(&mut self, node: &Node<'_>) -> Result<(), ReadError> {
        if self.end() > node.len {
            return Err(self.malformed(0, "an array with as many elements as the array around it refers to"));
        }
        let Some((bits, first)) = &node.valid else { return Ok(()) };
        let mut missing = std::mem::take(&mut self.missing);
        let mut position = 0;
        for range in self.ranges.iter().filter(|range| !range.is_empty()) {
            let (start, end) = (first + range.start, first + range.end);
            let bytes = bits.take(start / 8, end.div_ceil(8) - start / 8);
            let bytes =
                bytes.ok_or_else(|| self.malformed(position, "a validity bitmap with a bit for each element"))?;
            for bit in start % 8..start % 8 + range.len() {
                // An element within a null one is null already, whatever its own bit says.
                if bytes[bit / 8] >> (bit % 8) & 1 == 0 && missing.get(position) != Some(&true) {
                    // A mask has one entry per row, so it cannot mark a null within a list.
                    let in_lists = self.mask.is_some() || !self.offsets.is_empty();
                    match self.reader.nulls {
                        OnNull::Fill(_) => {}
                        OnNull::Mask if !in_lists => {}
                        _ => return Err(ReadError::Null { row: self.row_of(position) }),
                    }
                    if missing.is_empty() {
                        missing.resize(self.count(), false);
                    }
                    missing[position] = true;
                }
                position += 1;
            }
        }
        self.missing = missing;
        Ok(())
    }

    /// Descends to a field of a struct. The offset of the struct applies to its fields too.
    fn shift(&mut self, offset: usize) {
        if offset > 0 {
            self.ranges.iter_mut().for_each(|range| *range = range.start + offset..range.end + offset);
        }
    }

    /// Sets the mask of the rows, at the first call. No list has been passed by then, so there is one element per row,
    /// and the null elements are the null rows. The array is known to have that many elements, so the memory is in
    /// proportion.
    fn set_mask(&mut self) {
        if matches!(self.reader.nulls, OnNull::Mask) && self.mask.is_none() {
            let mut missing = self.missing.clone();
            missing.resize(self.count(), false);
            self.mask = Some(missing);
        }
    }

    fn lists(&mut self, node: &Node<'_>, wide: bool) -> Result<(), ReadError> {
        let (mut offsets, mut inner, mut position) = (vec![0i64], Vec::new(), 0);
        for range in self.ranges.iter().filter(|range| !range.is_empty()) {
            for pair in self.read_offsets(node, range, wide, position)?.windows(2) {
                let mut end = offsets[position];
                if !self.is_missing(position) {
                    append(&mut inner, pair[0] as usize..pair[1] as usize);
                    end = end.saturating_add(pair[1] - pair[0]);
                }
                if end > MOST_ELEMENTS {
                    return Err(self.malformed(position, "lists with at most 2^48 elements in all"));
                }
                offsets.push(end);
                position += 1;
            }
        }
        self.set_mask();
        self.offsets.push(offsets);
        (self.ranges, self.missing) = (inner, Vec::new());
        Ok(())
    }

    /// The offsets of the elements in `range`, and the end of the last one; checked not to decrease. `position` is the
    /// index of the first one among the needed elements, for errors.
    pub(super) fn read_offsets(
        &self,
        node: &Node<'_>,
        range: &Range<usize>,
        wide: bool,
        position: usize,
    ) -> Result<Vec<i64>, ReadError> {
        let width = if wide { 8 } else { 4 };
        let (at, len) = ((node.offset + range.start).saturating_mul(width), (range.len() + 1).saturating_mul(width));
        let bytes = node.buffers.first().and_then(|offsets| offsets.take(at, len));
        let bytes = bytes.ok_or_else(|| self.malformed(position, "an offset for each list or string"))?;
        let offsets: Vec<i64> = match wide {
            true => bytes.as_chunks().0.iter().map(|&bytes| i64::from_le_bytes(bytes)).collect(),
            false => bytes.as_chunks().0.iter().map(|&bytes| i32::from_le_bytes(bytes).into()).collect(),
        };
        let falls = |pair: &[i64]| pair[0] < 0 || pair[1] < pair[0];
        match offsets.windows(2).position(falls) {
            Some(element) => Err(self.malformed(position + element, "offsets that do not decrease")),
            None => Ok(offsets),
        }
    }

    fn fixed_lists(&mut self, depth: usize, node: &Node<'_>, length: usize) -> Result<(), ReadError> {
        self.check_room(depth)?;
        self.set_mask();
        let inner = |range: &Range<usize>| (node.offset + range.start) * length..(node.offset + range.end) * length;
        if self.reader.leaf.is_flat {
            self.ranges = self.ranges.iter().map(inner).collect();
            self.missing = self.missing.iter().flat_map(|&missing| std::iter::repeat_n(missing, length)).collect();
            self.per_row = Some(self.per_row.unwrap_or(1).saturating_mul(length).min(i64::MAX as usize));
            return Ok(());
        }
        let (mut offsets, mut ranges, mut position) = (vec![0], Vec::new(), 0);
        for element in self.ranges.iter().flat_map(Clone::clone) {
            let is_missing = self.is_missing(position);
            if !is_missing {
                append(&mut ranges, inner(&(element..element + 1)));
            }
            offsets.push(offsets[position] + if is_missing { 0 } else { length as i64 });
            position += 1;
        }
        self.offsets.push(offsets);
        (self.ranges, self.missing) = (ranges, Vec::new());
        Ok(())
    }

    /// Checks that the arrays within fixed-size lists have enough elements, before memory is allocated for them. Such
    /// lists have no buffer of their own whose length could be checked.
    fn check_room(&self, depth: usize) -> Result<(), ReadError> {
        let mut elements = Some(self.end());
        for (level, node) in self.reader.leaf.levels.iter().zip(self.nodes).skip(depth) {
            match &level.kind {
                LevelKind::FixedList(length) => {
                    let plus = |elements: usize| elements.checked_add(node.offset)?.checked_mul(*length);
                    elements = elements.and_then(plus);
                }
                LevelKind::Struct => elements = elements.and_then(|elements| elements.checked_add(node.offset)),
                _ => {
                    // Every element takes at least a bit of a buffer.
                    let bits = node.buffers.first().map_or(0, |buffer| buffer.len().saturating_mul(8));
                    let fits = elements.is_some_and(|elements| elements <= bits && elements <= node.len);
                    return if fits {
                        Ok(())
                    } else {
                        Err(self.malformed(0, "enough values for the fixed-size lists"))
                    };
                }
            }
        }
        Ok(())
    }
}

/// Appends a range; merges it with the last one if it begins where that ends.
fn append(ranges: &mut Vec<Range<usize>>, range: Range<usize>) {
    match ranges.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ if range.is_empty() => {}
        _ => ranges.push(range),
    }
}
