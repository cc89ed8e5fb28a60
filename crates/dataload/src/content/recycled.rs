//! Memory of bytes that were dropped, for the next ones. An allocator gives large pieces back to the system, which makes
//! them anew page by page: for the bytes of an image that takes as long as reading them.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Smaller pieces stay with the allocator anyway.
const LEAST_BYTES: usize = 1 << 16;
/// The most that is kept for reuse.
const KEPT_BYTES: usize = 64 << 20;

/// Memory for reuse.
#[derive(Debug, Default)]
pub(crate) struct Pool(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    bytes: usize,
    /// By size. Sizes are rounded, so that a piece serves for others of about its length.
    pieces: BTreeMap<usize, Vec<Vec<u8>>>,
}

/// The next of four sizes in each power of two, at most a quarter more.
fn rounded(length: usize) -> usize {
    let step = 1 << length.max(1).ilog2().saturating_sub(2);
    length.checked_next_multiple_of(step).unwrap_or(length)
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nothing yet, with room for so many bytes if there is such memory.
    pub(crate) fn take(&self, length: usize) -> Vec<u8> {
        if length < LEAST_BYTES {
            return Vec::new();
        }
        let size = rounded(length);
        let mut kept = self.lock();
        let piece = kept.pieces.get_mut(&size).and_then(Vec::pop);
        if piece.is_some() {
            kept.bytes -= size;
        }
        drop(kept);
        // Without memory there is an error where it is reserved.
        piece.unwrap_or_else(|| {
            let mut new = Vec::new();
            _ = new.try_reserve_exact(size);
            new
        })
    }

    fn give(&self, mut piece: Vec<u8>) {
        let size = piece.capacity();
        if size < LEAST_BYTES || rounded(size) != size {
            return;
        }
        piece.clear();
        let mut kept = self.lock();
        if kept.bytes + size <= KEPT_BYTES {
            kept.bytes += size;
            kept.pieces.entry(size).or_default().push(piece);
        }
    }
}

/// Bytes whose memory is used again when they are dropped.
pub(crate) struct Recycled {
    bytes: Vec<u8>,
    pool: Arc<Pool>,
}

impl Recycled {
    pub(crate) fn new(bytes: Vec<u8>, pool: &Arc<Pool>) -> Self {
        Self { bytes, pool: pool.clone() }
    }

    /// The bytes, whose memory is not used again.
    pub(crate) fn into_vec(mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }
}

impl Drop for Recycled {
    fn drop(&mut self) {
        self.pool.give(std::mem::take(&mut self.bytes));
    }
}

impl Deref for Recycled {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Clone for Recycled {
    fn clone(&self) -> Self {
        let mut bytes = self.pool.take(self.bytes.len());
        bytes.extend_from_slice(&self.bytes);
        Self::new(bytes, &self.pool)
    }
}

impl PartialEq for Recycled {
    fn eq(&self, other: &Self) -> bool {
        self.bytes == other.bytes
    }
}

impl Eq for Recycled {}

impl fmt::Debug for Recycled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.bytes.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_again_and_not_kept_without_a_bound() {
        let pool = Arc::new(Pool::default());
        let bytes = |length: usize| {
            let mut bytes = pool.take(length);
            bytes.resize(length, 1);
            Recycled::new(bytes, &pool)
        };
        let first = bytes(150_000);
        let memory = first.as_ptr();
        let second = first.clone();
        assert!(first == second && second.as_ptr() != memory);
        drop(first);
        // Of about the same length, and what is taken out is not used again.
        assert_eq!(bytes(160_000).as_ptr(), memory);
        let taken = bytes(140_000).into_vec();
        assert_eq!(taken.as_ptr(), memory);
        drop(taken);
        assert_eq!(pool.lock().bytes, 0);
        // Small ones are the allocator's, and no more is kept than may be.
        drop(bytes(1000));
        drop((0..100).map(|_| bytes(1 << 20)).collect::<Vec<_>>());
        let kept = pool.lock();
        assert!(kept.bytes <= KEPT_BYTES && kept.bytes > KEPT_BYTES / 2);
        assert_eq!(kept.bytes, kept.pieces.iter().map(|(size, pieces)| size * pieces.len()).sum::<usize>());
        assert!(kept.pieces.keys().all(|&size| size >= LEAST_BYTES));
    }
}
