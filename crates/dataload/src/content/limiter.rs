//! Reads of limited size.

use std::io::{self, Read, Seek, SeekFrom};

use super::{BUFFER_BYTES, HEADER_BYTES};

pub(super) trait Bytes: Read + Seek + Send {}

impl<R: Read + Seek + Send> Bytes for R {}

/// Limits each read to `most` bytes, and doubles the limit with every read, up to [`BUFFER_BYTES`].
pub(super) struct ReadLimiter {
    pub(super) input: Box<dyn Bytes>,
    pub(super) most: usize,
}

impl ReadLimiter {
    pub(super) fn new(input: impl Read + Seek + Send + 'static) -> Self {
        Self { input: Box::new(input), most: HEADER_BYTES }
    }
}

impl Read for ReadLimiter {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = buffer.len().min(self.most);
        self.most = (2 * self.most).min(BUFFER_BYTES);
        self.input.read(&mut buffer[..most])
    }
}

impl Seek for ReadLimiter {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.input.seek(to)
    }
}
