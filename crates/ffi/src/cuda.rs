//! Functions that need a CUDA build of libtorch. Without one, every call returns an error that says so.

use std::ffi::CString;
use std::ptr;

use tch::Tensor;

use crate::error::{Error, check, take_text};
use crate::raw;

pub use crate::cuda_missing::{NoCuda, why_unavailable};

/// Memory of one device as libtorch's caching allocator sees it, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Held by tensors now.
    pub allocated_bytes: i64,
    /// The most that tensors have held since the last reset.
    pub allocated_peak_bytes: i64,
    /// Reserved from the driver now, cached blocks included.
    pub reserved_bytes: i64,
    /// The most reserved from the driver since the last reset.
    pub reserved_peak_bytes: i64,
    /// How often an allocation failed and was retried after cached blocks had been freed.
    pub alloc_retries: i64,
}

/// Whether the CUDA-only parts were compiled in, with or without a GPU in this machine.
pub fn is_compiled() -> bool {
    // SAFETY: no arguments.
    unsafe { raw::od_cuda_compiled() != 0 }
}

/// The device's name, for example "NVIDIA H200".
///
/// # Errors
/// Without CUDA, or when there is no such device.
///
/// # Source
/// `torch.cuda.get_device_name`
pub fn device_name(device: usize) -> Result<String, Error> {
    let mut out = ptr::null_mut();
    // SAFETY: `out` lives through the call.
    check(|err| unsafe { raw::od_cuda_device_name(index(device), &mut out, err) })?;
    // SAFETY: the call has made a string that is ours.
    Ok(unsafe { take_text(out) })
}

/// The device's compute capability, major and minor: `(9, 0)` for an H200.
///
/// float16 products run on tensor cores from 7.0, bfloat16 and TF32 ones from 8.0. Does not wait for the device.
///
/// # Errors
/// Without CUDA, or when there is no such device.
///
/// # Source
/// `torch.cuda.get_device_capability`
pub fn device_capability(device: usize) -> Result<(i32, i32), Error> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both live through the call.
    check(|err| unsafe { raw::od_cuda_device_capability(index(device), &mut major, &mut minor, err) })?;
    Ok((major, minor))
}

/// The device's UUID, which no other device has, on no host. Does not wait for the device, and makes no context on it.
///
/// # Errors
/// Without CUDA, or when there is no such device.
///
/// # Source
/// `torch.cuda.get_device_properties(..).uuid`
pub fn device_uuid(device: usize) -> Result<[u8; 16], Error> {
    let mut uuid = [0; 16];
    // SAFETY: it lives through the call, which writes 16 bytes.
    check(|err| unsafe { raw::od_cuda_device_uuid(index(device), uuid.as_mut_ptr(), err) })?;
    Ok(uuid)
}

/// The caching allocator's statistics for the device.
///
/// # Errors
/// Without CUDA, or when there is no such device.
///
/// # Syncs
/// No.
///
/// # Source
/// `torch.cuda.memory_stats`
pub fn memory_stats(device: usize) -> Result<MemoryStats, Error> {
    let mut out = raw::MemoryStats::default();
    // SAFETY: `out` lives through the call.
    check(|err| unsafe { raw::od_cuda_memory_stats(index(device), &mut out, err) })?;
    Ok(MemoryStats {
        allocated_bytes: out.allocated_bytes,
        allocated_peak_bytes: out.allocated_peak_bytes,
        reserved_bytes: out.reserved_bytes,
        reserved_peak_bytes: out.reserved_peak_bytes,
        alloc_retries: out.alloc_retries,
    })
}

/// Resets the peaks of [`memory_stats`] to the current values.
///
/// # Errors
/// Without CUDA, or when there is no such device.
///
/// # Source
/// `torch.cuda.reset_peak_memory_stats`
pub fn reset_peak_memory_stats(device: usize) -> Result<(), Error> {
    // SAFETY: no pointers but the error slot.
    check(|err| unsafe { raw::od_cuda_reset_peak_memory_stats(index(device), err) })
}

/// Gives cached, unused blocks back to the driver.
///
/// # Errors
/// Without CUDA.
///
/// # Syncs
/// Yes: the driver waits for the device when memory is freed.
///
/// # Source
/// `torch.cuda.empty_cache`
pub fn empty_cache() -> Result<(), Error> {
    // SAFETY: no pointers but the error slot.
    check(|err| unsafe { raw::od_cuda_empty_cache(err) })
}

/// Allows this process a share of the device's memory, from 0 to 1. More is an error of the kind
/// [`OutOfMemory`](crate::ErrorKind::OutOfMemory).
///
/// # Errors
/// Without CUDA, when there is no such device, or for another share.
///
/// # Source
/// `torch.cuda.set_per_process_memory_fraction`
pub fn set_memory_fraction(device: usize, fraction: f64) -> Result<(), Error> {
    // SAFETY: no pointers but the error slot.
    check(|err| unsafe { raw::od_cuda_set_memory_fraction(index(device), fraction, err) })
}

/// Changes the caching allocator's settings, in the form of the variable `PYTORCH_CUDA_ALLOC_CONF`:
/// `expandable_segments:True,max_split_size_mb:512`. Memory that is allocated already stays as it is.
///
/// # Errors
/// Without CUDA; for a setting that libtorch does not know.
///
/// # Source
/// `torch.cuda.memory._set_allocator_settings`
pub fn set_allocator_settings(settings: &str) -> Result<(), Error> {
    let settings = CString::new(settings).map_err(|_| Error::refused("a setting cannot have a zero byte"))?;
    // SAFETY: the text lives through the call.
    check(|err| unsafe { raw::od_cuda_set_allocator_settings(settings.as_ptr(), err) })
}

/// Records from now on, or no longer, what the caching allocators do and which C++ functions asked for it, for
/// [`memory_snapshot`].
///
/// # Errors
/// Without CUDA.
///
/// # Source
/// `torch.cuda.memory._record_memory_history`
pub fn record_memory_history(enabled: bool) -> Result<(), Error> {
    // SAFETY: no pointers but the error slot.
    check(|err| unsafe { raw::od_cuda_record_memory_history(i32::from(enabled), err) })
}

/// The state of the caching allocators and what was recorded, as a pickle that <https://pytorch.org/memory_viz> reads.
///
/// # Errors
/// Without CUDA.
///
/// # Source
/// `torch.cuda.memory._dump_snapshot`
pub fn memory_snapshot() -> Result<Vec<u8>, Error> {
    let mut out = ptr::null_mut();
    // SAFETY: `out` receives an owner.
    check(|err| unsafe { raw::od_cuda_memory_snapshot(&mut out, err) })?;
    // SAFETY: as above.
    let bytes = unsafe { Tensor::from_ptr(out) };
    Vec::<u8>::try_from(&bytes).map_err(Error::from)
}

/// While this guard lives, a libtorch call that makes the host wait for the device is an error, on every thread.
///
/// For tests that check a step for hidden waits. Explicit waits (`synchronize`) remain allowed.
///
/// # Source
/// `torch.cuda.set_sync_debug_mode("error")`
#[must_use = "waiting is allowed again when the guard is dropped"]
#[derive(Debug)]
pub struct ForbidSync {
    previous: i32,
}

impl ForbidSync {
    /// Forbids waiting from here on.
    ///
    /// # Errors
    /// Without CUDA.
    pub fn new() -> Result<Self, Error> {
        const ERROR: i32 = 2;
        let mut previous = 0;
        // SAFETY: `previous` lives through the call.
        check(|err| unsafe { raw::od_cuda_set_sync_debug_mode(ERROR, &mut previous, err) })?;
        Ok(Self { previous })
    }
}

impl Drop for ForbidSync {
    fn drop(&mut self) {
        let mut forbidden = 0;
        // SAFETY: `forbidden` lives through the call. The mode was read by `new`, so it is valid.
        let restored = check(|err| unsafe { raw::od_cuda_set_sync_debug_mode(self.previous, &mut forbidden, err) });
        debug_assert!(restored.is_ok(), "sync debug mode not restored: {restored:?}");
    }
}

/// A number too large for libtorch's index becomes one without a device, and so an error.
fn index(device: usize) -> i32 {
    i32::try_from(device).unwrap_or(i32::MAX)
}
