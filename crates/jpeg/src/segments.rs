//! The entropy-coded data of one scan, without byte stuffing, split into segments at restart markers.

use crate::Error;
use crate::bits::{Bits, PADDING};

/// The data of a scan; its buffers are kept from one scan to the next.
#[derive(Default)]
pub(crate) struct Segments {
    bytes: Vec<u8>,
    /// Where each segment ends in `bytes`, its padding included.
    ends: Vec<usize>,
    /// Where the scan begins in the file.
    offset: usize,
}

impl Segments {
    /// Reads the scan that begins at `offset`, and returns the offset of the marker after it.
    pub(crate) fn read(&mut self, file: &[u8], offset: usize) -> Result<usize, Error> {
        self.bytes.clear();
        self.ends.clear();
        self.offset = offset;
        let mut rest = file.get(offset..).unwrap_or_default();
        loop {
            let at = memchr::memchr(0xff, rest).filter(|at| at + 1 < rest.len());
            let at = at.ok_or(Error::Damaged { at: file.len(), found: "the end of the file" })?;
            let here = file.len() - rest.len() + at;
            let (taken, skipped) = match rest[at + 1] {
                0 => (at + 1, 2),
                0xff => (at, 1),
                _ => (at, 2),
            };
            self.bytes.extend_from_slice(&rest[..taken]);
            match rest[at + 1] {
                0 | 0xff => {}
                marker => {
                    self.bytes.extend_from_slice(&[0; PADDING]);
                    self.ends.push(self.bytes.len());
                    if !(0xd0..=0xd7).contains(&marker) {
                        return Ok(here);
                    }
                    if usize::from(marker & 7) != (self.ends.len() - 1) % 8 {
                        return Err(Error::Damaged { at: here, found: "restart markers that are out of order" });
                    }
                }
            }
            rest = &rest[at + skipped..];
        }
    }

    /// Refuses a scan with too few or too many segments for its units.
    pub(crate) fn check_count(&self, units: usize, interval: usize) -> Result<(), Error> {
        let expected = if interval == 0 { 1 } else { units.div_ceil(interval) };
        if self.ends.len() == expected {
            return Ok(());
        }
        Err(self.fault("a wrong number of restart markers"))
    }

    /// The bits of a segment.
    pub(crate) fn bits(&self, segment: usize) -> Bits<'_> {
        let start = segment.checked_sub(1).map_or(0, |before| self.ends[before]);
        Bits::new(&self.bytes[start..self.ends[segment]])
    }

    /// Refuses a segment that was not read exactly to its end: then some of it was misread.
    ///
    /// The last segment may have unread bytes, since cameras pad there.
    pub(crate) fn check_end(&self, segment: usize, bits: &Bits<'_>) -> Result<(), Error> {
        if bits.overrun() {
            return Err(self.fault("the end of its data"));
        }
        if bits.leaves_bytes() && segment + 1 < self.ends.len() {
            return Err(self.fault("surplus bytes before a restart marker"));
        }
        Ok(())
    }

    /// A fault of this scan, at its offset.
    pub(crate) fn fault(&self, found: &'static str) -> Error {
        Error::Damaged { at: self.offset, found }
    }

    /// Bytes held.
    pub(crate) fn held(&self) -> usize {
        self.bytes.capacity() + self.ends.capacity() * size_of::<usize>()
    }
}
