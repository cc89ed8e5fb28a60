//! Hooks of the tensors that autograd saves for backward passes.
//!
//! Users call `overdrive_memory`.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use tch::Tensor;

use crate::callback::{self, BoxError};
use crate::error::{Error, check};
use crate::raw_saved_tensors as raw;

/// What to do with tensors that are saved for backward passes.
pub trait Hooks: Send + Sync {
    /// Called when a tensor is saved, with gradients off. `None` keeps the tensor as it is.
    ///
    /// What is kept must not hold the tensor itself unless it is a leaf: it may be the output of the node that saves it,
    /// and the two would keep each other alive. [`without_history`] gives another one of the same memory.
    ///
    /// # Errors
    /// The operator that saves the tensor fails with it.
    fn pack(&self, tensor: &Tensor) -> Result<Option<Box<dyn Packed>>, BoxError>;
}

/// A tensor as it was packed.
pub trait Packed: Send + Sync {
    /// The tensor, for a backward pass: of the same shape, dtype and device. May be called several times, and on threads
    /// of libtorch's.
    ///
    /// # Errors
    /// The backward pass fails with it.
    fn unpack(&self) -> Result<Tensor, BoxError>;
}

/// The calling thread's saved tensors go through hooks until this is dropped. Hooks that were set before are not asked
/// meanwhile.
///
/// # Source
/// `torch.autograd.graph.saved_tensors_hooks`
#[must_use = "the hooks are taken away when the guard is dropped"]
#[derive(Debug)]
pub struct HooksGuard {
    number: u64,
    _not_send: PhantomData<*const ()>,
}

impl HooksGuard {
    /// Sets hooks.
    ///
    /// # Errors
    /// When the process has Python's autograd engine, or memory runs out.
    pub fn new(hooks: Arc<dyn Hooks>) -> Result<Self, Error> {
        let hooks = raw::SavedHooks {
            owner: Box::into_raw(Box::new(hooks)).cast(),
            pack: on_pack,
            unpack: on_unpack,
            drop: callback::drop_box::<Arc<dyn Hooks>>,
            drop_packed: callback::drop_box::<Box<dyn Packed>>,
            drop_panic: callback::drop_panic,
        };
        let mut number = 0;
        // SAFETY: both live through the call, which takes ownership of `owner`.
        check(|err| unsafe { raw::od_saved_hooks_push(&hooks, &mut number, err) })?;
        Ok(Self { number, _not_send: PhantomData })
    }
}

impl Drop for HooksGuard {
    fn drop(&mut self) {
        // SAFETY: the guard is not `Send`, so this is the thread that has pushed them.
        unsafe { raw::od_saved_hooks_pop(self.number) }
    }
}

extern "C" fn on_pack(
    owner: *mut c_void,
    tensor: *const torch_sys::C_tensor,
    packed: *mut *mut c_void,
    panic: *mut *mut c_void,
    err: *mut crate::raw::Error,
) -> crate::raw::Status {
    let run = || {
        // SAFETY: `owner` was made of such a box, and is kept through this call. The tensor is the caller's.
        let (hooks, tensor) =
            unsafe { (&*owner.cast::<Arc<dyn Hooks>>(), ManuallyDrop::new(Tensor::from_ptr(tensor.cast_mut()))) };
        if let Some(made) = hooks.pack(&tensor)? {
            // SAFETY: the caller's out-parameter.
            unsafe { *packed = Box::into_raw(Box::new(made)).cast() };
        }
        Ok(())
    };
    // SAFETY: `panic` and `err` are the caller's.
    unsafe { callback::answer("a hook of saved tensors", panic, err, run) }
}

extern "C" fn on_unpack(
    packed: *mut c_void,
    out: *mut *mut torch_sys::C_tensor,
    panic: *mut *mut c_void,
    err: *mut crate::raw::Error,
) -> crate::raw::Status {
    let run = || {
        // SAFETY: `packed` was made of such a box in `on_pack`, and is kept through this call.
        let tensor = unsafe { &*packed.cast::<Box<dyn Packed>>() }.unpack()?;
        // SAFETY: the caller's out-parameter; the caller owns the tensor from now on.
        unsafe { *out = ManuallyDrop::new(tensor).as_mut_ptr() };
        Ok(())
    };
    // SAFETY: `panic` and `err` are the caller's.
    unsafe { callback::answer("a hook of saved tensors", panic, err, run) }
}

/// A tensor that is saved as operators save their inputs: through the hooks of the moment. Changing it in place makes
/// unpacking an error.
pub struct SavedTensor(NonNull<raw::SavedTensor>);

// SAFETY: it is constant once made, and unpacking may run on several threads at once, as libtorch's own passes do.
unsafe impl Send for SavedTensor {}
// SAFETY: as above.
unsafe impl Sync for SavedTensor {}

impl SavedTensor {
    /// Saves a tensor; an undefined one stays undefined.
    ///
    /// # Errors
    /// Those of a hook.
    pub fn new(tensor: &Tensor) -> Result<Self, Error> {
        let mut out = ptr::null_mut();
        // SAFETY: the tensor lives through the call, and `out` receives an owner.
        check(|err| unsafe { raw::od_saved_tensor_new(tensor.as_ptr(), &mut out, err) })?;
        NonNull::new(out).map(Self).ok_or_else(|| Error::refused("a tensor was not saved"))
    }

    /// The tensor with its place in the graph.
    ///
    /// # Errors
    /// When it was changed in place since, and those of a hook.
    ///
    /// # Panics
    /// When a hook panics, with what it panicked with.
    pub fn unpack(&self) -> Result<Tensor, Error> {
        let (mut out, mut panic) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the saved tensor is live, and the out-parameters live through the call.
        let status = check(|err| unsafe { raw::od_saved_tensor_unpack(self.0.as_ptr(), &mut out, &mut panic, err) });
        // SAFETY: a callback has made it, and the C++ side has handed it over.
        unsafe { callback::resume(panic) };
        status?;
        // SAFETY: the call has made a tensor that is ours.
        Ok(unsafe { Tensor::from_ptr(out) })
    }
}

impl Drop for SavedTensor {
    fn drop(&mut self) {
        // SAFETY: it is live, and never used again.
        unsafe { raw::od_saved_tensor_free(self.0.as_ptr()) }
    }
}

impl std::fmt::Debug for SavedTensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SavedTensor")
    }
}

/// Knows a tensor again: the same part of the same memory, not changed since. It keeps no memory, and memory that was freed
/// is never the same.
pub struct SameTensor(NonNull<raw::SameTensor>);

// SAFETY: it is constant once made, and holds a weak reference, which libtorch counts atomically.
unsafe impl Send for SameTensor {}
// SAFETY: as above.
unsafe impl Sync for SameTensor {}

impl SameTensor {
    /// Takes note of a tensor.
    ///
    /// # Errors
    /// When it is sparse, or memory runs out.
    pub fn of(tensor: &Tensor) -> Result<Self, Error> {
        let mut out = ptr::null_mut();
        // SAFETY: the tensor lives through the call, and `out` receives an owner.
        check(|err| unsafe { raw::od_same_tensor_new(tensor.as_ptr(), &mut out, err) })?;
        NonNull::new(out).map(Self).ok_or_else(|| Error::refused("a tensor was not noted"))
    }

    /// Whether this is the tensor.
    pub fn is(&self, tensor: &Tensor) -> bool {
        // SAFETY: both are live.
        unsafe { raw::od_same_tensor_is(self.0.as_ptr(), tensor.as_ptr()) != 0 }
    }
}

impl Drop for SameTensor {
    fn drop(&mut self) {
        // SAFETY: it is live, and never used again.
        unsafe { raw::od_same_tensor_free(self.0.as_ptr()) }
    }
}

impl std::fmt::Debug for SameTensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SameTensor")
    }
}

/// Whether a tensor is a leaf that requires a gradient, or a view of one.
pub fn is_parameter(tensor: &Tensor) -> bool {
    // SAFETY: the tensor is live.
    unsafe { raw::od_tensor_is_parameter(tensor.as_ptr()) != 0 }
}

/// In [`Hooks::pack`]: whether it is ReLU that saves this tensor, its result, of which its gradient needs the sign alone.
/// False where another operator saves the same tensor.
pub fn is_relu_saving(tensor: &Tensor) -> bool {
    // SAFETY: the tensor is live.
    unsafe { raw::od_tensor_is_relu_saving(tensor.as_ptr()) != 0 }
}

/// The number of the backward pass that runs on this thread.
pub fn backward_pass() -> Option<i64> {
    // SAFETY: no pointers.
    Some(unsafe { raw::od_backward_pass() }).filter(|&number| number >= 0)
}

/// Drops a value when the backward pass that runs on this thread is over, or has failed; outside of one at once.
///
/// # Errors
/// When memory runs out.
pub fn keep_for_pass<T: Send + 'static>(value: T) -> Result<(), Error> {
    let owner = Box::into_raw(Box::new(value)).cast::<c_void>();
    // SAFETY: the C++ side drops `owner`, once, also on failure.
    check(|err| unsafe { raw::od_keep_for_pass(owner, callback::drop_box::<T>, err) })
}

/// Another tensor of the same memory, without a history. If one is changed in place, both have the new version.
///
/// # Errors
/// When the tensor is undefined, or memory runs out.
pub fn without_history(tensor: &Tensor) -> Result<Tensor, Error> {
    let mut out = ptr::null_mut();
    // SAFETY: the tensor lives through the call, and `out` receives an owner.
    check(|err| unsafe { raw::od_tensor_data(tensor.as_ptr(), &mut out, err) })?;
    // SAFETY: as above.
    Ok(unsafe { Tensor::from_ptr(out) })
}

/// How often a tensor was changed in place (`Tensor._version`).
pub fn version(tensor: &Tensor) -> i64 {
    // SAFETY: the tensor is live.
    unsafe { raw::od_tensor_version(tensor.as_ptr()) }
}

/// Gives a tensor a count of changes in place of its own, which begins at `version`: other handles of its memory keep
/// theirs.
///
/// # Errors
/// For a tensor that counts none, such as one of inference mode.
///
/// # Source
/// `torch._C._autograd._unsafe_set_version_counter`
pub fn set_version(copy: &Tensor, version: i64) -> Result<(), Error> {
    // SAFETY: the tensor is live.
    check(|err| unsafe { raw::od_tensor_set_version(copy.as_ptr(), version, err) })
}

#[cfg(test)]
mod tests;
