//! Reads rows of a column into plain memory: from the outermost lists to the values.

use std::ops::Range;

use super::columns::OnNull;
use super::layout::{Leaf, StepKind};
use super::node::Node;
use crate::DataError;
use crate::columns::{Array, FieldKind};

/// No memory holds more: offsets that say so are damaged.
const MOST_ELEMENTS: i64 = 1 << 48;

/// Why rows could not be read; a row's number is that in its record batch.
#[derive(Debug)]
pub(super) enum Bad {
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
    /// The column's type, which is not read.
    Unsupported(String),
    Other(DataError),
}

impl From<DataError> for Bad {
    fn from(error: DataError) -> Self {
        Self::Other(error)
    }
}

/// How a column is read.
#[derive(Clone, Copy)]
pub(super) struct Reader<'a> {
    pub(super) leaf: &'a Leaf,
    pub(super) nulls: &'a OnNull,
    /// The values of a column of codes.
    pub(super) dictionary: Option<&'a Array>,
    /// The most bytes that the values may take.
    pub(super) limit: u64,
}

/// The elements of one array that are read, and what is known from the arrays above.
pub(super) struct Walk<'a> {
    pub(super) reader: Reader<'a>,
    nodes: &'a [Node<'a>],
    first_row: usize,
    /// The elements, in order.
    pub(super) ranges: Vec<Range<usize>>,
    /// Which elements are null; empty where none is.
    pub(super) missing: Vec<bool>,
    offsets: Vec<Vec<i64>>,
    per_row: Option<usize>,
    /// Which rows are null, where nulls are masked.
    mask: Option<Vec<bool>>,
}

impl<'a> Reader<'a> {
    /// The values of `rows`, and which of them are null where nulls are masked. `nodes` are the arrays of the leaf's
    /// steps.
    pub(super) fn read(self, nodes: &[Node<'_>], rows: Range<usize>) -> Result<(Array, Option<Vec<bool>>), Bad> {
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
            return Err(Bad::Unsupported(found.clone()));
        }
        for (number, (step, node)) in self.leaf.steps.iter().zip(nodes).enumerate() {
            walk.mark_nulls(node)?;
            match &step.kind {
                StepKind::Struct => walk.shift(node.offset),
                StepKind::List { wide } => walk.lists(node, *wide)?,
                StepKind::FixedList(length) => walk.fixed_lists(number, node, *length)?,
                StepKind::Values(stored) => {
                    let (values, text) = walk.values(stored, node)?;
                    walk.set_mask();
                    walk.offsets.extend(text);
                    let (element, per_row) = (stored.element(), walk.per_row);
                    let array = Array { element, rows: rows.len(), per_row, offsets: walk.offsets, values };
                    return Ok((array, walk.mask));
                }
                StepKind::Unsupported(_) => break,
            }
        }
        Err(Bad::Malformed { row: rows.start, expected: "values of a type that is read" })
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
        let list = |element: usize, offsets: &Vec<i64>| {
            offsets.partition_point(|&start| start <= element as i64).saturating_sub(1)
        };
        self.first_row + self.offsets.iter().rev().fold(element / self.per_row.unwrap_or(1).max(1), list)
    }

    pub(super) fn malformed(&self, element: usize, expected: &'static str) -> Bad {
        Bad::Malformed { row: self.row_of(element), expected }
    }

    pub(super) fn is_missing(&self, element: usize) -> bool {
        self.missing.get(element).copied().unwrap_or(false)
    }

    /// Finds the elements that are null.
    fn mark_nulls(&mut self, node: &Node<'_>) -> Result<(), Bad> {
        if self.end() > node.len {
            return Err(self.malformed(0, "an array with an element for each of its rows"));
        }
        let Some((bits, first)) = &node.valid else { return Ok(()) };
        let mut missing = std::mem::take(&mut self.missing);
        let mut position = 0;
        for range in self.ranges.iter().filter(|range| !range.is_empty()) {
            let (start, end) = (first + range.start, first + range.end);
            let bytes = bits.take(start / 8, end.div_ceil(8) - start / 8);
            let bytes = bytes.ok_or_else(|| self.malformed(position, "a bit for each element that may be null"))?;
            for bit in start % 8..start % 8 + range.len() {
                // Below a null, whatever is there is no value.
                if bytes[bit / 8] >> (bit % 8) & 1 == 0 && missing.get(position) != Some(&true) {
                    let in_lists = self.mask.is_some() || !self.offsets.is_empty();
                    match self.reader.nulls {
                        OnNull::Fill(_) => {}
                        OnNull::Mask if !in_lists => {}
                        _ => return Err(Bad::Null { row: self.row_of(position) }),
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

    /// Moves on to arrays whose elements are numbered as in the buffers of the one above.
    fn shift(&mut self, offset: usize) {
        if offset > 0 {
            self.ranges.iter_mut().for_each(|range| *range = range.start + offset..range.end + offset);
        }
    }

    /// What is null now is what is null in the rows, since lists come next, or nothing. That as many elements are there
    /// has been checked before.
    fn set_mask(&mut self) {
        if matches!(self.reader.nulls, OnNull::Mask) && self.mask.is_none() {
            let mut missing = self.missing.clone();
            missing.resize(self.count(), false);
            self.mask = Some(missing);
        }
    }

    fn lists(&mut self, node: &Node<'_>, wide: bool) -> Result<(), Bad> {
        let (mut level, mut inner, mut position) = (vec![0i64], Vec::new(), 0);
        for range in self.ranges.iter().filter(|range| !range.is_empty()) {
            for pair in self.read_offsets(node, range, wide, position)?.windows(2) {
                let mut end = level[position];
                if !self.is_missing(position) {
                    append(&mut inner, pair[0] as usize..pair[1] as usize);
                    end = end.saturating_add(pair[1] - pair[0]);
                }
                if end > MOST_ELEMENTS {
                    return Err(self.malformed(position, "lists with as many elements as there can be"));
                }
                level.push(end);
                position += 1;
            }
        }
        self.set_mask();
        self.offsets.push(level);
        (self.ranges, self.missing) = (inner, Vec::new());
        Ok(())
    }

    /// The offsets of the elements in `range`, and the end of the last one; they do not decrease.
    pub(super) fn read_offsets(
        &self,
        node: &Node<'_>,
        range: &Range<usize>,
        wide: bool,
        position: usize,
    ) -> Result<Vec<i64>, Bad> {
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

    fn fixed_lists(&mut self, number: usize, node: &Node<'_>, length: usize) -> Result<(), Bad> {
        self.check_room(number)?;
        self.set_mask();
        let inner = |range: &Range<usize>| (node.offset + range.start) * length..(node.offset + range.end) * length;
        if self.reader.leaf.is_flat {
            self.ranges = self.ranges.iter().map(inner).collect();
            self.missing = self.missing.iter().flat_map(|&missing| std::iter::repeat_n(missing, length)).collect();
            self.per_row = Some(self.per_row.unwrap_or(1).saturating_mul(length).min(i64::MAX as usize));
            return Ok(());
        }
        let (mut level, mut ranges, mut position) = (vec![0], Vec::new(), 0);
        for element in self.ranges.iter().flat_map(Clone::clone) {
            let is_missing = self.is_missing(position);
            if !is_missing {
                append(&mut ranges, inner(&(element..element + 1)));
            }
            level.push(level[position] + if is_missing { 0 } else { length as i64 });
            position += 1;
        }
        self.offsets.push(level);
        (self.ranges, self.missing) = (ranges, Vec::new());
        Ok(())
    }

    /// Checks that the arrays below have as many elements as lists of fixed lengths say, before memory is allocated for
    /// them: such lists have no buffers of their own.
    fn check_room(&self, number: usize) -> Result<(), Bad> {
        let mut elements = Some(self.end());
        for (step, node) in self.reader.leaf.steps.iter().zip(self.nodes).skip(number) {
            match &step.kind {
                StepKind::FixedList(length) => {
                    let plus = |elements: usize| elements.checked_add(node.offset)?.checked_mul(*length);
                    elements = elements.and_then(plus);
                }
                StepKind::Struct => elements = elements.and_then(|elements| elements.checked_add(node.offset)),
                _ => {
                    let bits = node.buffers.first().map_or(0, |buffer| buffer.len().saturating_mul(8));
                    let fits = elements.is_some_and(|elements| elements <= bits && elements <= node.len);
                    return if fits {
                        Ok(())
                    } else {
                        Err(self.malformed(0, "values for all lists of a fixed length"))
                    };
                }
            }
        }
        Ok(())
    }
}

/// Adds a range, to the last one where it continues that.
fn append(ranges: &mut Vec<Range<usize>>, range: Range<usize>) {
    match ranges.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ if range.is_empty() => {}
        _ => ranges.push(range),
    }
}
