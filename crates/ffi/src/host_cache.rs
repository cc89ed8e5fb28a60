//! Host memory kept between steps.

use crate::error::{Error, check};
use crate::raw;

/// Keeps up to `limit` bytes of tensors' host memory that is freed, for tensors that come next.
///
/// Without it the system takes large blocks back, or not, as malloc's heap happens to lie, and hands out others a page
/// fault every 4 KiB: gradients that are freed with each step then cost several milliseconds for every 10 MB. With it,
/// steps on a CPU take the same memory again. Blocks below 256 KiB are left to malloc. For the whole process and all threads,
/// from here on; again with another limit, or with 0 to give everything back and to keep nothing.
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
    // SAFETY: there is nothing to keep.
    check(|err| unsafe { raw::od_host_cache_limit(limit, err) })
}

/// How many bytes [`cache_host_memory`] holds for what comes next.
///
/// # Errors
/// When memory runs out.
pub fn cached_host_memory() -> Result<usize, Error> {
    let mut held = 0;
    // SAFETY: `held` lives through the call.
    check(|err| unsafe { raw::od_host_cache_held(&mut held, err) })?;
    Ok(held)
}
