//! Copies between a GPU and host memory that overlap with the computation, into tensors that exist already.

use std::fmt;
use std::ptr::{self, NonNull};

use tch::Tensor;

use crate::error::{Error, check};
use crate::raw_side_stream as raw;

/// A separate CUDA stream for copies in both directions. The copies of one stream run in order, so a copy may read host
/// memory that an earlier one has written, without an event between the two.
///
/// # Source
/// `torch.cuda.Stream` around `Tensor.copy_(.., non_blocking=True)`
pub struct SideStream(NonNull<raw::SideStream>);

// SAFETY: the handle of a stream is a plain number, CUDA takes calls on a stream from any thread, and a lock guards the
// events.
unsafe impl Send for SideStream {}
// SAFETY: as above.
unsafe impl Sync for SideStream {}

impl SideStream {
    /// A stream from libtorch's pool for the CUDA device with this number.
    ///
    /// # Errors
    /// Without CUDA, or when there is no such device.
    pub fn new(device: usize) -> Result<Self, Error> {
        let device = i32::try_from(device).unwrap_or(i32::MAX);
        let mut out = ptr::null_mut();
        // SAFETY: `out` lives through the call.
        check(|err| unsafe { raw::od_side_stream_new(device, &mut out, err) })?;
        Ok(Self(NonNull::new(out).expect("a status of success comes with a stream")))
    }

    /// Starts a copy, which begins after the work that the calling thread's current stream was given so far. One tensor
    /// is on the stream's device; the result keeps it alive. The other one is in pinned host memory; the caller has to
    /// keep it until the copy has ended.
    ///
    /// # Errors
    /// `Other` for tensors of different shapes or dtypes, or on other devices; `OutOfMemory` when a tensor is not
    /// contiguous and there is no memory for a contiguous copy; `Cuda`.
    ///
    /// # Syncs
    /// The host waits only for tensors in pageable memory.
    pub fn copy(&self, from: &Tensor, to: &Tensor) -> Result<Transfer, Error> {
        let mut out = ptr::null_mut();
        // SAFETY: stream and tensors live through the call.
        check(|err| unsafe { raw::od_side_stream_copy(self.0.as_ptr(), from.as_ptr(), to.as_ptr(), &mut out, err) })?;
        Ok(Transfer(NonNull::new(out).expect("a status of success comes with a transfer")))
    }

    /// Waits until the host may read and write the memory of all copies that were started.
    ///
    /// # Errors
    /// `Cuda`, also for earlier work of the device that failed.
    ///
    /// # Syncs
    /// Yes, until the copies have ended.
    pub fn synchronize(&self) -> Result<(), Error> {
        // SAFETY: the stream lives through the call.
        check(|err| unsafe { raw::od_side_stream_synchronize(self.0.as_ptr(), err) })
    }
}

impl Drop for SideStream {
    fn drop(&mut self) {
        // SAFETY: made by `od_side_stream_new`, not used again.
        unsafe { raw::od_side_stream_free(self.0.as_ptr()) }
    }
}

impl fmt::Debug for SideStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SideStream")
    }
}

/// A copy that a [`SideStream`] has started. It keeps the device's tensor alive. When it is dropped, the stream that
/// was current at the start waits for the copy, so that the tensor's memory can be reused on that stream.
pub struct Transfer(NonNull<raw::Transfer>);

// SAFETY: CUDA takes calls on an event from any thread, and `&mut` in `tensor` keeps them from overlapping.
unsafe impl Send for Transfer {}

impl Transfer {
    /// The device's tensor, to be used on the calling thread's current stream, which waits for the copy.
    ///
    /// # Errors
    /// `Cuda`
    ///
    /// # Syncs
    /// No: only the stream waits.
    pub fn tensor(&mut self) -> Result<Tensor, Error> {
        let mut out = ptr::null_mut();
        // SAFETY: the transfer lives through the call.
        check(|err| unsafe { raw::od_transfer_tensor(self.0.as_ptr(), &mut out, err) })?;
        // SAFETY: the call has made a tensor that is ours.
        Ok(unsafe { Tensor::from_ptr(out) })
    }

    /// The handle, which the caller has to free.
    pub(crate) fn into_raw(self) -> *mut raw::Transfer {
        std::mem::ManuallyDrop::new(self).0.as_ptr()
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        // SAFETY: made by `od_side_stream_copy`, not used again.
        unsafe { raw::od_transfer_free(self.0.as_ptr()) }
    }
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Transfer")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_device_is_an_error() {
        assert!(SideStream::new(usize::MAX).is_err());
        if !tch::Cuda::is_available() {
            assert!(SideStream::new(0).is_err());
        }
    }
}
