//! A cache of freed host memory.

use crate::error::{Error, check};
use crate::raw;

/// Keeps up to `limit` bytes of freed host memory for the next tensors.
///
/// Without it, malloc may return large freed blocks to the system, depending on the state of its heap, and new blocks
/// cost a page fault every 4 KiB: gradients that are freed in each step then cost several milliseconds per 10 MB. With
/// it, steps on a CPU reuse the same memory. Blocks below 256 KiB are left to malloc. It applies to the whole process
/// and all threads from here on. Call it again to change the limit; 0 frees everything and keeps nothing.
///
/// # Errors
/// When memory runs out.
///
/// # Syncs
/// No.
///
/// # Source
/// What `torch.cuda`'s caching allocator does for a GPU.
pub fn cache_host_memory(limit: usize) -> Result<(), Error> {
    // SAFETY: no pointers but the error slot.
    check(|err| unsafe { raw::od_host_cache_limit(limit, err) })
}

/// How many bytes [`cache_host_memory`] keeps now for the next tensors.
///
/// # Errors
/// When memory runs out.
pub fn cached_host_memory() -> Result<usize, Error> {
    let mut held = 0;
    // SAFETY: `held` lives through the call.
    check(|err| unsafe { raw::od_host_cache_held(&mut held, err) })?;
    Ok(held)
}
