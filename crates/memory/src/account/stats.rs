//! What the allocators of the host and of devices say.

use overdrive_ffi::{cuda, host_memory};
use tch::Device;

use super::record::cuda_index;
use crate::error::MemoryError;

/// What tensors on a device have and had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Bytes that tensors have.
    pub allocated: u64,
    /// The most that they had, since the beginning or [`reset_peak_memory_stats`].
    pub allocated_peak: u64,
    /// Bytes that the allocator has taken from the driver; on the host those of tensors.
    pub reserved: u64,
    /// The most that it had taken.
    pub reserved_peak: u64,
    /// How often memory ran out: on a device the allocator then freed its cache and tried again, on the host the
    /// operator failed.
    pub refused: u64,
}

/// What tensors on a device have and had. On the host they count from
/// [`host_memory::count`](overdrive_ffi::host_memory::count) on.
///
/// # Errors
/// When there is no such device, or it is neither the host nor CUDA's.
///
/// # Source
/// `torch.cuda.memory_stats`
#[doc(alias = "max_memory_allocated")]
#[doc(alias = "memory_allocated")]
pub fn memory_stats(device: Device) -> Result<MemoryStats, MemoryError> {
    match device {
        Device::Cpu => {
            let stats = host_memory::stats()?;
            let (now, peak) = (stats.allocated, stats.peak);
            let of_tensors = MemoryStats { allocated: now, allocated_peak: peak, ..MemoryStats::default() };
            Ok(MemoryStats { reserved: now, reserved_peak: peak, refused: stats.refused, ..of_tensors })
        }
        _ => {
            let stats = cuda::memory_stats(checked_index(device)?)?;
            Ok(MemoryStats {
                allocated: bytes(stats.allocated_bytes),
                allocated_peak: bytes(stats.allocated_peak_bytes),
                reserved: bytes(stats.reserved_bytes),
                reserved_peak: bytes(stats.reserved_peak_bytes),
                refused: bytes(stats.alloc_retries),
            })
        }
    }
}

/// The peaks count from now on.
///
/// # Errors
/// As [`memory_stats`].
///
/// # Source
/// `torch.cuda.reset_peak_memory_stats`
pub fn reset_peak_memory_stats(device: Device) -> Result<(), MemoryError> {
    match device {
        Device::Cpu => host_memory::reset_peak()?,
        _ => cuda::reset_peak_memory_stats(checked_index(device)?)?,
    }
    Ok(())
}

/// Allows tensors a share of a CUDA device's memory, from 0 to 1. More is an error of the kind
/// [`OutOfMemory`](overdrive_ffi::ErrorKind::OutOfMemory). For the host,
/// [`host_memory::count`](overdrive_ffi::host_memory::count) takes a number of bytes.
///
/// # Errors
/// When there is no such device, for the host, and for another share.
///
/// # Source
/// `torch.cuda.set_per_process_memory_fraction`
pub fn set_per_process_memory_fraction(fraction: f64, device: Device) -> Result<(), MemoryError> {
    Ok(cuda::set_memory_fraction(checked_index(device)?, fraction)?)
}

fn checked_index(device: Device) -> Result<usize, MemoryError> {
    cuda_index(device).ok_or(MemoryError::Device { device })
}

fn bytes(count: i64) -> u64 {
    u64::try_from(count).unwrap_or_default()
}
