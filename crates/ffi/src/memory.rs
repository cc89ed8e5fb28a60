//! Host memory that a GPU can read directly.

use std::ptr;

use tch::{Kind, Tensor};

use crate::error::{Error, check};
use crate::kind::to_scalar_type;
use crate::raw;

/// An uninitialised tensor in page-locked host memory, from which a copy to the GPU can run beside the computation.
///
/// # Shapes
/// `shape`, row-major.
///
/// # Errors
/// [`ErrorKind::Cuda`](crate::ErrorKind::Cuda) or `Other` without a CUDA device; `OutOfMemory` when no pages are left
/// to lock; `Other` for a negative size.
///
/// # Syncs
/// Allocating may wait for the driver; a block that the caching allocator already holds does not.
///
/// # Source
/// `torch.empty(.., pin_memory=True)`
pub fn empty_pinned(shape: &[i64], kind: Kind) -> Result<Tensor, Error> {
    let mut out = ptr::null_mut();
    // SAFETY: the shape lives through the call; on success `out` is a tensor that we own.
    check(|err| unsafe { raw::od_empty_pinned(shape.as_ptr(), shape.len(), to_scalar_type(kind), &mut out, err) })?;
    // SAFETY: as above.
    Ok(unsafe { Tensor::from_ptr(out) })
}
