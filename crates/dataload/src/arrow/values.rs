//! Reads the values at the end of a column's arrays: numbers, strings and indices of a dictionary.

use std::ops::Range;
use std::sync::Arc;

use super::layout::Stored;
use super::node::{Node, Piece};
use super::read::{ReadError, Walk};
use crate::columns::{Array, Element, Words};

/// The place of a value's bytes.
enum Segment {
    Buffer(usize, Range<usize>),
    Fill,
}

impl Walk<'_> {
    /// The values, and the offsets of strings.
    pub(super) fn values(&self, stored: &Stored, node: &Node<'_>) -> Result<(Words, Option<Vec<i64>>), ReadError> {
        match stored {
            Stored::Plain(element) => Ok((self.plain(*element, node)?, None)),
            Stored::Texts { wide } => self.texts(node, *wide),
            Stored::Views => self.views(node),
            Stored::Codes { bytes, signed, values } => {
                let array = self.decode(&self.codes(node, *bytes, *signed)?, values.element())?;
                Ok((array.values, array.offsets.into_iter().next()))
            }
        }
    }

    /// How many bytes the needed values take, if they are the first of their buffer and stored as a tensor's are.
    pub(super) fn bytes_in_place(&self, stored: &Stored, node: &Node<'_>) -> Option<usize> {
        let Stored::Plain(element) = stored else { return None };
        let [range] = self.ranges.as_slice() else { return None };
        let bytes = self.count().checked_mul(element.bytes())?;
        let as_stored = !matches!(element, Element::Bool | Element::Uint16 | Element::Uint32);
        let are_first = node.offset + range.start == 0 && node.buffers.first()?.has(0, bytes);
        (bytes > 0 && as_stored && are_first && !self.missing.contains(&true)).then_some(bytes)
    }

    fn limited(&self, bytes: u64) -> Result<usize, ReadError> {
        if bytes > self.reader.limit { Err(ReadError::TooLarge { bytes }) } else { Ok(bytes as usize) }
    }

    fn plain(&self, element: Element, node: &Node<'_>) -> Result<Words, ReadError> {
        let short = |position| self.malformed(position, "a value for each row");
        if self.count() == 0 {
            return Ok(Words::default());
        }
        let buffer = node.buffers.first().ok_or_else(|| short(0))?;
        let stored = match element {
            Element::Uint16 => 2,
            Element::Uint32 => 4,
            other => other.bytes(),
        };
        let is_there = |range: &Range<usize>| match element {
            Element::Bool => buffer.has(0, (node.offset + range.end).div_ceil(8)),
            _ => (node.offset + range.end).checked_mul(stored).is_some_and(|end| buffer.has(0, end)),
        };
        if !self.ranges.iter().filter(|range| !range.is_empty()).all(is_there) {
            return Err(short(0));
        }
        let size = element.bytes();
        let mut values = Words::new(self.limited((self.count() as u64).saturating_mul(size as u64))?)?;
        let mut rest = values.bytes_mut();
        let mut position = 0;
        for range in self.ranges.iter().filter(|range| !range.is_empty()) {
            let (here, tail) = rest.split_at_mut(range.len() * size);
            let first = node.offset + range.start;
            if !read_plain(buffer, element, first, stored, here) {
                return Err(short(position));
            }
            (rest, position) = (tail, position + range.len());
        }
        if let Some(fill) = self.reader.nulls.fill(size) {
            let places = values.bytes_mut().chunks_exact_mut(size).zip(&self.missing);
            places.filter(|(_, missing)| **missing).for_each(|(place, _)| place.copy_from_slice(&fill));
        }
        Ok(values)
    }

    /// The value that replaces a null; it has `size` bytes, or any size if that is 0.
    fn fill(&self, size: usize) -> Arc<[u8]> {
        self.reader.nulls.fill(size).unwrap_or_default()
    }

    fn texts(&self, node: &Node<'_>, wide: bool) -> Result<(Words, Option<Vec<i64>>), ReadError> {
        let mut segments = Vec::new();
        let mut lengths = Vec::with_capacity(self.missing.len());
        for range in self.ranges.iter().filter(|range| !range.is_empty()) {
            for pair in self.read_offsets(node, range, wide, lengths.len())?.windows(2) {
                let (range, missing) = (pair[0] as usize..pair[1] as usize, self.is_missing(lengths.len()));
                lengths.push(self.add(node, &mut segments, (1, range), missing, lengths.len())?);
            }
        }
        self.join(node, &segments, &lengths)
    }

    fn views(&self, node: &Node<'_>) -> Result<(Words, Option<Vec<i64>>), ReadError> {
        const VIEW_BYTES: usize = 16;
        const INLINE_BYTES: usize = 12;
        let (mut segments, mut lengths) = (Vec::new(), Vec::new());
        for element in self.ranges.iter().flat_map(Clone::clone) {
            let position = lengths.len();
            let at = (node.offset + element).saturating_mul(VIEW_BYTES);
            let view = node.buffers.first().and_then(|views| views.take(at, VIEW_BYTES));
            let view = view.ok_or_else(|| self.malformed(position, "a view for each string"))?;
            let [length, _, buffer, start] = [0, 4, 8, 12].map(|at| {
                usize::try_from(i32::from_le_bytes(std::array::from_fn(|byte| view[at + byte]))).unwrap_or(usize::MAX)
            });
            let (buffer, start) = if length <= INLINE_BYTES { (0, at + 4) } else { (buffer.saturating_add(1), start) };
            let range = start..start.saturating_add(length);
            lengths.push(self.add(node, &mut segments, (buffer, range), self.is_missing(position), position)?);
        }
        self.join(node, &segments, &lengths)
    }

    /// Adds a string, and returns its length.
    fn add(
        &self,
        node: &Node<'_>,
        segments: &mut Vec<Segment>,
        (buffer, range): (usize, Range<usize>),
        missing: bool,
        position: usize,
    ) -> Result<usize, ReadError> {
        if missing {
            segments.push(Segment::Fill);
            return Ok(self.fill(0).len());
        }
        let length = range.len();
        if length > 0 && !node.buffers.get(buffer).is_some_and(|piece| piece.has(range.start, length)) {
            return Err(self.malformed(position, "strings within their buffer"));
        }
        match segments.last_mut() {
            _ if length == 0 => {}
            Some(Segment::Buffer(last, before)) if *last == buffer && before.end == range.start => {
                before.end = range.end;
            }
            _ => segments.push(Segment::Buffer(buffer, range)),
        }
        Ok(length)
    }

    /// Reads the bytes of all strings, and their offsets.
    fn join(
        &self,
        node: &Node<'_>,
        segments: &[Segment],
        lengths: &[usize],
    ) -> Result<(Words, Option<Vec<i64>>), ReadError> {
        let fill = self.fill(0);
        let mut values = Words::new(self.limited(lengths.iter().map(|&length| length as u64).sum())?)?;
        let mut rest = values.bytes_mut();
        for segment in segments {
            let length = match segment {
                Segment::Buffer(_, range) => range.len(),
                Segment::Fill => fill.len(),
            };
            let (here, tail) = rest.split_at_mut(length);
            match segment {
                Segment::Fill => here.copy_from_slice(&fill),
                Segment::Buffer(buffer, range) => {
                    if !node.buffers[*buffer].read(range.start, here) {
                        return Err(self.malformed(0, "strings within their buffer"));
                    }
                }
            }
            rest = tail;
        }
        let mut offsets = vec![0i64];
        offsets.extend(lengths.iter().scan(0, |end, &length| {
            *end += length as i64;
            Some(*end)
        }));
        Ok((values, Some(offsets)))
    }

    /// Reads indices of a dictionary. A null has the index after the last one.
    fn codes(&self, node: &Node<'_>, width: usize, signed: bool) -> Result<Vec<u32>, ReadError> {
        let known = self.reader.dictionary.map_or(0, |dictionary| dictionary.rows);
        let mut codes = Vec::new();
        for range in self.ranges.iter().filter(|range| !range.is_empty()) {
            let at = (node.offset + range.start).saturating_mul(width);
            let bytes = node.buffers.first().and_then(|codes| codes.take(at, range.len().saturating_mul(width)));
            let bytes = bytes.ok_or_else(|| self.malformed(codes.len(), "an index for each row"))?;
            for code in bytes.chunks_exact(width) {
                let negative = signed && code[width - 1] >> 7 == 1;
                let code = code.iter().rev().fold(0u64, |code, &byte| code << 8 | u64::from(byte));
                let missing = self.is_missing(codes.len());
                if !missing && (negative || code >= known as u64) {
                    return Err(self.malformed(codes.len(), "indices within the dictionary"));
                }
                codes.push(if missing { known } else { code as usize } as u32);
            }
        }
        Ok(codes)
    }

    fn decode(&self, codes: &[u32], element: Element) -> Result<Array, ReadError> {
        let is_text = element == Element::Bytes;
        if codes.is_empty() {
            return Ok(Array {
                offsets: vec![vec![0]; usize::from(is_text)],
                ..Array::of_values(element, 0, Words::default())
            });
        }
        let known = self.reader.dictionary.ok_or_else(|| self.malformed(0, "a dictionary before the rows"))?;
        if u32::try_from(known.rows).is_err() {
            return Err(self.malformed(0, "a dictionary of less than 2^32 values"));
        }
        let with_null;
        let mut values = known;
        if self.missing.contains(&true) {
            let fill = self.fill(if is_text { 0 } else { element.bytes() });
            let mut words = Words::new(fill.len())?;
            words.bytes_mut().copy_from_slice(&fill);
            let offsets = if is_text { vec![vec![0, fill.len() as i64]] } else { Vec::new() };
            let null = Array { offsets, ..Array::of_values(element, 1, words) };
            with_null = Array::copied(vec![(known, 0..known.rows), (&null, 0..null.rows)], false)?;
            values = &with_null;
        }
        let length = |code: &u32| match values.offsets.first() {
            Some(offsets) => (offsets[*code as usize + 1] - offsets[*code as usize]) as u64,
            None => element.bytes() as u64,
        };
        self.limited(codes.iter().map(length).fold(0, u64::saturating_add))?;
        Ok(Array::gather(&[values], codes, Words::new)?)
    }
}

/// Reads the values from `first` on, each of `stored` bytes; false if there are fewer.
fn read_plain(buffer: &Piece<'_>, element: Element, first: usize, stored: usize, out: &mut [u8]) -> bool {
    match element {
        Element::Bool => {
            let start = first / 8;
            let Some(bits) = buffer.take(start, (first + out.len()).div_ceil(8) - start) else { return false };
            let bits = (first % 8..).map(|bit| bits[bit / 8] >> (bit % 8) & 1);
            out.iter_mut().zip(bits).for_each(|(out, bit)| *out = bit);
            true
        }
        Element::Uint16 => {
            let Some(bytes) = buffer.take(first * stored, out.len() / 2) else { return false };
            let wide = bytes.as_chunks().0.iter().map(|&bytes| i32::from(u16::from_le_bytes(bytes)).to_ne_bytes());
            out.as_chunks_mut().0.iter_mut().zip(wide).for_each(|(out, wide)| *out = wide);
            true
        }
        Element::Uint32 => {
            let Some(bytes) = buffer.take(first * stored, out.len() / 2) else { return false };
            let wide = bytes.as_chunks().0.iter().map(|&bytes| i64::from(u32::from_le_bytes(bytes)).to_ne_bytes());
            out.as_chunks_mut().0.iter_mut().zip(wide).for_each(|(out, wide)| *out = wide);
            true
        }
        _ => buffer.read(first * stored, out),
    }
}
