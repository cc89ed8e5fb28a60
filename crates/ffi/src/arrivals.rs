//! Copies to a device, each of which holds up only what uses its tensor.

use std::fmt;
use std::ptr::{self, NonNull};

use crate::error::{Error, check};
use crate::raw_arrivals as raw;
use crate::side_stream::Transfer;

/// Copies to tensors of a GPU. The first operator, on any thread, that uses one of the tensors, or a view of it, makes
/// the stream that it is for wait for the tensor's copy; so does [`Package::run`](crate::Package::run). Any other
/// access meanwhile is an error, but for that of a CUDA graph that is replayed, which nobody sees.
///
/// Until all copies were waited for, each operator of the process takes the host a little longer.
pub struct Arrivals {
    raw: NonNull<raw::Arrivals>,
    len: usize,
}

// SAFETY: the C++ side locks all access.
unsafe impl Send for Arrivals {}

impl Arrivals {
    /// From now on, what uses the tensors of these transfers to the device waits for them.
    ///
    /// # Errors
    /// When memory runs out; then the stream from which the copies were started waits for them.
    ///
    /// # Syncs
    /// No.
    pub fn new(transfers: Vec<Transfer>) -> Result<Self, Error> {
        let given: Vec<_> = transfers.into_iter().map(Transfer::into_raw).collect();
        let mut out = ptr::null_mut();
        // SAFETY: the transfers are ours, and not used again; `out` lives through the call.
        check(|err| unsafe { raw::od_arrivals_new(given.as_ptr(), given.len(), &mut out, err) })?;
        let raw = NonNull::new(out).ok_or_else(|| Error::refused("libtorch returned no arrivals"))?;
        Ok(Self { raw, len: given.len() })
    }

    /// Makes the stream from which the copies were started, and the current one, wait for all copies. Returns the places
    /// of the tensors that were used, in the order of their first uses.
    ///
    /// # Errors
    /// `Cuda`
    ///
    /// # Syncs
    /// No.
    pub fn finish(self) -> Result<Vec<usize>, Error> {
        let (mut used, mut count) = (vec![0; self.len], 0);
        // SAFETY: the handle is live; there is room for all places.
        check(|err| unsafe { raw::od_arrivals_finish(self.raw.as_ptr(), used.as_mut_ptr(), &mut count, err) })?;
        used.truncate(count);
        Ok(used)
    }
}

/// As [`finish`](Arrivals::finish).
impl Drop for Arrivals {
    fn drop(&mut self) {
        // SAFETY: made by `od_arrivals_new`, not used again.
        unsafe { raw::od_arrivals_free(self.raw.as_ptr()) }
    }
}

impl fmt::Debug for Arrivals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Arrivals")
    }
}
