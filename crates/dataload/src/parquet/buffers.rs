//! Reusable memory for pages: allocating fresh memory costs more than decoding into it.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

/// More buffers than the threads of one machine need.
const MAX_KEPT: usize = 64;
/// Pages are usually 1 MiB; larger buffers than this are freed.
const MAX_KEPT_BYTES: usize = 1 << 23;

/// Buffers that return here when they are dropped.
#[derive(Clone, Default)]
pub(super) struct Buffers(Arc<Mutex<Vec<Vec<u8>>>>);

impl Buffers {
    /// A buffer whose content is left from earlier use.
    pub(super) fn take(&self) -> Buffer {
        let bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
        Buffer { bytes, length: 0, home: self.clone() }
    }
}

/// A buffer of which the first `length` bytes are in use; the rest is left from earlier use.
pub(super) struct Buffer {
    bytes: Vec<u8>,
    length: usize,
    home: Buffers,
}

impl Buffer {
    /// The first `length` bytes, to be overwritten.
    pub(super) fn resize(&mut self, length: usize) -> &mut [u8] {
        if self.bytes.len() < length {
            self.bytes.resize(length, 0);
        }
        self.length = length;
        &mut self.bytes[..length]
    }

    pub(super) fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        let mut kept = self.home.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < MAX_KEPT && (1..=MAX_KEPT_BYTES).contains(&bytes.len()) {
            kept.push(bytes);
        }
    }
}
