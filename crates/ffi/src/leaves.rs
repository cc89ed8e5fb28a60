//! The leaves that a part of the forward pass uses.

use std::ptr::{self, NonNull};

use tch::Tensor;

use crate::error::{Error, check};
use crate::raw_leaves as raw;

/// Finds leaves that were changed in place after a part of the forward pass had used them: computing that part again
/// would give other results. autograd finds this only for tensors that an operator saves; this also for others that
/// require gradients, such as biases.
pub struct Leaves(NonNull<raw::Leaves>);

// SAFETY: the C++ side locks all access.
unsafe impl Send for Leaves {}
// SAFETY: as above.
unsafe impl Sync for Leaves {}

impl Leaves {
    /// Begins a part of the forward pass on the calling thread.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn begin() -> Result<Self, Error> {
        let mut out = ptr::null_mut();
        // SAFETY: `out` receives an owner.
        check(|err| unsafe { raw::od_leaves_new(&mut out, err) })?;
        NonNull::new(out).map(Self).ok_or_else(|| Error::refused("libtorch returned no list of leaves"))
    }

    /// Notes the leaves from which `tensor` was computed since [`begin`](Self::begin), and their versions.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn see(&self, tensor: &Tensor) -> Result<(), Error> {
        // SAFETY: both are live.
        check(|err| unsafe { raw::od_leaves_see(self.0.as_ptr(), tensor.as_ptr(), err) })
    }

    /// Ends the part, and releases its graph, which is kept alive until then.
    pub fn finish(&self) {
        // SAFETY: it is live.
        unsafe { raw::od_leaves_finish(self.0.as_ptr()) }
    }

    /// A leaf that was changed in place since it was used.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn changed(&self) -> Result<Option<Tensor>, Error> {
        let mut out = ptr::null_mut();
        // SAFETY: it is live, and `out` receives an owner or null.
        check(|err| unsafe { raw::od_leaves_changed(self.0.as_ptr(), &mut out, err) })?;
        // SAFETY: as above.
        Ok((!out.is_null()).then(|| unsafe { Tensor::from_ptr(out) }))
    }
}

impl Drop for Leaves {
    fn drop(&mut self) {
        // SAFETY: it is live, and never used again.
        unsafe { raw::od_leaves_free(self.0.as_ptr()) }
    }
}

impl std::fmt::Debug for Leaves {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Leaves")
    }
}
