//! Copies to a GPU that overlap with its computation.

use std::fmt;
use std::ptr::{self, NonNull};

use tch::Tensor;

use crate::error::{Error, check};
use crate::raw;

/// A separate CUDA stream for copies from the host.
///
/// Copies start at once and overlap with the computing stream. Before the copies are used, the stream that uses them
/// must [wait](CopyEvent::wait) for the event recorded after them; the host does not wait.
///
/// # Source
/// `torch.cuda.Stream` around `tensor.to(device, non_blocking=True)`
pub struct CopyStream(NonNull<raw::CopyStream>);

// SAFETY: the handle of a stream is a plain number, and CUDA takes calls on a stream from any thread.
unsafe impl Send for CopyStream {}
// SAFETY: as above.
unsafe impl Sync for CopyStream {}

impl CopyStream {
    /// A stream from libtorch's pool for the CUDA device with this number.
    ///
    /// # Errors
    /// Without CUDA, or when there is no such device.
    pub fn new(device: usize) -> Result<Self, Error> {
        let device = i32::try_from(device).unwrap_or(i32::MAX);
        let mut out = ptr::null_mut();
        // SAFETY: `out` lives through the call.
        check(|err| unsafe { raw::od_copy_stream_new(device, &mut out, err) })?;
        Ok(Self(NonNull::new(out).expect("a status of success comes with a stream")))
    }

    /// Starts a copy of a host tensor.
    ///
    /// # Errors
    /// `OutOfMemory` on the device; `Cuda`.
    ///
    /// # Syncs
    /// The host waits only for tensors in pageable memory.
    pub fn upload(&self, host: &Tensor) -> Result<Tensor, Error> {
        let mut out = ptr::null_mut();
        // SAFETY: stream and tensor live through the call; on success `out` is a tensor that we own.
        check(|err| unsafe { raw::od_copy_stream_upload(self.0.as_ptr(), host.as_ptr(), &mut out, err) })?;
        // SAFETY: as above.
        Ok(unsafe { Tensor::from_ptr(out) })
    }

    /// Records an event after all copies that were started so far.
    ///
    /// # Errors
    /// `Cuda`
    pub fn record(&self) -> Result<CopyEvent, Error> {
        let mut out = ptr::null_mut();
        // SAFETY: the stream lives through the call.
        check(|err| unsafe { raw::od_copy_stream_record(self.0.as_ptr(), &mut out, err) })?;
        Ok(CopyEvent(NonNull::new(out).expect("a status of success comes with an event")))
    }

    /// Ends the last batch: the memory of its dropped tensors goes back to libtorch's allocator, which gives it to
    /// later copies of this stream, or frees it. Without this call it is kept until the next [`wait`](CopyEvent::wait).
    ///
    /// # Errors
    /// `Cuda`
    ///
    /// # Syncs
    /// No: only this stream waits, for the work that used that memory.
    pub fn end_batch(&self) -> Result<(), Error> {
        // SAFETY: the stream lives through the call.
        check(|err| unsafe { raw::od_copy_stream_end_batch(self.0.as_ptr(), err) })
    }
}

impl Drop for CopyStream {
    fn drop(&mut self) {
        // SAFETY: made by `od_copy_stream_new`, not used again.
        unsafe { raw::od_copy_stream_free(self.0.as_ptr()) }
    }
}

impl fmt::Debug for CopyStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CopyStream")
    }
}

/// A point in a [`CopyStream`].
pub struct CopyEvent(NonNull<raw::CopyEvent>);

// SAFETY: CUDA takes calls on an event from any thread, and `&mut` in `wait` keeps them from overlapping.
unsafe impl Send for CopyEvent {}

impl CopyEvent {
    /// Makes the calling thread's current stream wait until the copies before this point are done, and begins the next
    /// batch: from now on this stream uses `tensors`.
    ///
    /// The memory of a dropped tensor is reused by later copies. Before they write it, the copy stream waits for the
    /// work that this stream was given until the drop. That wait begins only with the next batch, so that copies
    /// overlap with the computation of this one. So a loop needs memory for no more tensors at a time than it holds,
    /// however far the host is ahead of the device. Work on a third stream has to be joined with this one before the
    /// drop: `record_stream` has no effect on these tensors.
    ///
    /// # Errors
    /// `Cuda`; `Other` for a tensor that is not on a CUDA device.
    ///
    /// # Syncs
    /// No: only the stream waits.
    pub fn wait<'a>(&mut self, tensors: impl IntoIterator<Item = &'a Tensor>) -> Result<(), Error> {
        self.wait_as(true, tensors)
    }

    /// As [`wait`](Self::wait), but the last batch goes on: for a thread that prepares the next batch meanwhile, and
    /// whose copies must not wait for the computation of the last one.
    ///
    /// # Errors
    /// As for `wait`.
    ///
    /// # Syncs
    /// No: only the stream waits.
    pub fn wait_ahead<'a>(&mut self, tensors: impl IntoIterator<Item = &'a Tensor>) -> Result<(), Error> {
        self.wait_as(false, tensors)
    }

    fn wait_as<'a>(&mut self, begins: bool, tensors: impl IntoIterator<Item = &'a Tensor>) -> Result<(), Error> {
        // SAFETY: the event lives through the call.
        check(|err| unsafe { raw::od_copy_event_wait(self.0.as_ptr(), i32::from(begins), err) })?;
        for tensor in tensors {
            // SAFETY: both live through the call.
            check(|err| unsafe { raw::od_copy_event_adopt(self.0.as_ptr(), tensor.as_ptr(), err) })?;
        }
        Ok(())
    }
}

impl Drop for CopyEvent {
    fn drop(&mut self) {
        // SAFETY: made by `od_copy_stream_record`, not used again.
        unsafe { raw::od_copy_event_free(self.0.as_ptr()) }
    }
}

impl fmt::Debug for CopyEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CopyEvent")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_device_is_an_error() {
        assert!(CopyStream::new(usize::MAX).is_err());
        if !tch::Cuda::is_available() {
            assert!(CopyStream::new(0).is_err());
        }
    }
}
