//! How much host memory tensors use.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use tch::{Device, Tensor};

use crate::error::{Error, check};
use crate::raw;

/// How much memory tensors on the host use and have used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostMemoryStats {
    /// Bytes in use now, by tensors that were made since counting began.
    pub allocated: u64,
    /// The most bytes in use at once, since counting began or since [`reset_peak`].
    pub peak: u64,
    /// How often memory was allocated.
    pub allocations: u64,
    /// How often more memory than allowed was asked for.
    pub refused: u64,
}

/// Starts to count what libtorch allocates for tensors on the host, in the whole process, and allows at most `limit`
/// bytes; more is an error of the kind [`OutOfMemory`](crate::ErrorKind::OutOfMemory). `usize::MAX` is no limit. Call
/// it again to change the limit. Not counted are what was allocated before the first call, pinned memory, memory that a
/// tensor borrows, and what [`cache_host_memory`](crate::cache_host_memory) keeps.
///
/// Each allocation then takes a lock, some 0.1 us.
///
/// # Errors
/// When memory runs out.
///
/// # Source
/// What `torch.cuda.set_per_process_memory_fraction` does for a GPU.
pub fn count(limit: usize) -> Result<(), Error> {
    // SAFETY: no pointers but the error slot.
    check(|err| unsafe { raw::od_host_memory_count(limit, err) })
}

/// What was counted so far; zeros before [`count`] was called.
///
/// # Errors
/// When memory runs out.
pub fn stats() -> Result<HostMemoryStats, Error> {
    let mut out = raw::HostMemory::default();
    // SAFETY: `out` lives through the call.
    check(|err| unsafe { raw::od_host_memory_stats(&mut out, err) })?;
    let raw::HostMemory { allocated, peak, allocations, refused } = out;
    Ok(HostMemoryStats { allocated, peak, allocations, refused })
}

/// Sets the peak to what is in use now.
///
/// # Errors
/// When memory runs out.
///
/// # Source
/// `torch.cuda.reset_peak_memory_stats`
pub fn reset_peak() -> Result<(), Error> {
    // SAFETY: no pointers but the error slot.
    check(|err| unsafe { raw::od_host_memory_reset_peak(err) })
}

/// Returns the memory that malloc has free to the system, after work that needed much for a short time. The host works
/// some ms on a large heap. Without effect where malloc is not glibc's.
///
/// # Source
/// `malloc_trim(0)`
pub fn trim() {
    // SAFETY: it takes nothing, and may be called at any time.
    unsafe { raw::od_host_memory_trim() }
}

/// Opens a folder for [`in_files`].
///
/// # Errors
/// When it cannot be opened, or is none.
pub fn open_folder(path: &Path) -> io::Result<File> {
    let opened = File::open(path)?;
    match opened.metadata()?.is_dir() {
        true => Ok(opened),
        false => Err(io::ErrorKind::NotADirectory.into()),
    }
}

/// Tells the system that a tensor which [`in_files`] has made is read soon, so that it reads the file ahead. Without
/// effect for other tensors.
///
/// # Source
/// `madvise(MADV_WILLNEED)`
pub fn read_ahead(tensor: &Tensor) {
    if tensor.defined() && tensor.device() == Device::Cpu && !tensor.is_sparse() && tensor.is_contiguous() {
        let bytes = tensor.numel() * tensor.kind().elt_size_in_bytes();
        // SAFETY: the advice changes no memory; the tensor has so many bytes and lives through the call.
        unsafe { raw::od_host_memory_read_ahead(tensor.data_ptr(), bytes) };
    }
}

/// Calls `work`, and puts the tensors of 256 KiB and more that it makes on the host, on this thread, into files in an
/// open folder. The files are mapped into memory: the system reads what is used, and writes it back and drops it when
/// memory gets scarce. The files have no names, and end with their tensors, also when the process is killed. [`count`]
/// does not count them.
///
/// A tensor for which the disk has no room is an error of the kind [`Io`](crate::ErrorKind::Io) where it is made. A
/// disk that fails later ends the process with SIGBUS, as with any mapped file. Linux only; a folder in a `tmpfs` is
/// memory.
///
/// # Errors
/// When memory runs out; then nothing was called.
///
/// # Source
/// `torch.UntypedStorage.from_file`
pub fn in_files<T>(folder: &File, work: impl FnOnce() -> T) -> Result<T, Error> {
    // SAFETY: no pointers but the error slot.
    check(|err| unsafe { raw::od_host_memory_install(err) })?;
    // SAFETY: the folder is open until the guard sets the one before.
    let _guard = InFolder(unsafe { raw::od_host_memory_in_folder(folder.as_raw_fd()) });
    Ok(work())
}

/// Restores the previous folder when dropped, also by a panic.
struct InFolder(i32);

impl Drop for InFolder {
    fn drop(&mut self) {
        // SAFETY: whoever set it still has it open: the call of `in_files` around this one.
        unsafe { raw::od_host_memory_in_folder(self.0) };
    }
}
