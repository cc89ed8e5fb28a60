//! Callbacks for when a parameter's gradient is complete.

use std::any::Any;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{self, ThreadId};

use tch::Tensor;

use crate::error::{Error, check};
use crate::raw;

/// Calls a function whenever a tensor's gradient is complete, until this is dropped: when a backward pass has added to
/// it, or, if a reducer averages the gradient over ranks, at the end of the pass that averages it. A pass that leaves
/// such a gradient local does not call the function.
///
/// A tensor can have one hook. The function runs on the thread that computes the gradient, which is the caller's for a
/// CPU and one of libtorch's for a GPU, and may read and free the gradient. If the function itself runs a backward
/// pass, that pass does not call it again.
///
/// Dropping never waits, so the function itself may drop the hook; a call under way on any thread still ends.
///
/// # Source
/// `torch.Tensor.register_post_accumulate_grad_hook`
pub struct GradHook(Arc<Shared>);

type Call = Box<dyn FnMut() + Send>;

#[derive(Default)]
struct Shared {
    /// `None` once the hook is dropped. libtorch's side of the hook lives as long as the tensor, so that a backward
    /// pass on another thread never calls into freed memory.
    call: Mutex<Option<Call>>,
    /// The thread that runs the function.
    runs_on: Mutex<Option<ThreadId>>,
    /// The hook is dropped: the thread that holds the lock of `call`, or takes it next, drops the function.
    is_over: AtomicBool,
    /// What the function panicked with.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The function's panics are caught while the lock is held, so poisoning means nothing.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn run(&self) {
        let this_thread = Some(thread::current().id());
        if self.is_over.load(Ordering::SeqCst) || *lock(&self.runs_on) == this_thread {
            return;
        }
        if let Some(call) = lock(&self.call).as_mut() {
            *lock(&self.runs_on) = this_thread;
            if let Err(panic) = catch_unwind(AssertUnwindSafe(call)) {
                *lock(&self.panic) = Some(panic);
            }
            *lock(&self.runs_on) = None;
        }
        self.drop_call_if_over();
    }

    /// Drops the function if the hook is over and the function is not running. If it is running, `run` drops it
    /// afterwards.
    fn drop_call_if_over(&self) {
        if !self.is_over.load(Ordering::SeqCst) {
            return;
        }
        let call = match self.call.try_lock() {
            Ok(mut call) => call.take(),
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner().take(),
            Err(TryLockError::WouldBlock) => None,
        };
        // After unlocking, because dropping what the function holds may run arbitrary code.
        drop(call);
    }
}

impl GradHook {
    /// Calls `call` from now on.
    ///
    /// # Errors
    /// When `tensor` is not a leaf that requires a gradient, or already has a hook; and within a backward pass if the
    /// tensor is in a graph.
    ///
    /// # Syncs
    /// If the tensor is in a graph, waits for the backward passes of other threads: one may be about to call the
    /// tensor's previous hook.
    pub fn new(tensor: &Tensor, call: impl FnMut() + Send + 'static) -> Result<Self, Error> {
        let shared = Arc::new(Shared { call: Mutex::new(Some(Box::new(call))), ..Shared::default() });
        let owner = Arc::into_raw(shared.clone()).cast_mut().cast::<c_void>();
        // SAFETY: the tensor lives through the call. `owner` is a counted reference that the C++ side passes to
        // `on_drop` once, on success and on failure, and to the other callbacks only before that.
        check(|err| unsafe { raw::od_grad_hook_set(tensor.as_ptr(), owner, on_grad, on_drop, is_idle, err) })?;
        Ok(Self(shared))
    }

    /// Resumes the panic of a call since the last time, if there was one: it could not unwind through libtorch.
    pub fn resume_panic(&self) {
        let panic = lock(&self.0.panic).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Drop for GradHook {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::SeqCst);
        self.0.drop_call_if_over();
    }
}

impl std::fmt::Debug for GradHook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("GradHook")
    }
}

extern "C" fn on_grad(owner: *mut c_void) {
    // SAFETY: `owner` came out of `Arc::into_raw` above, and its reference is kept until the C++ side drops the hook.
    let shared = unsafe { &*owner.cast::<Shared>() };
    // `run` catches the function's panics; this catches panics in dropping what the function holds.
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| shared.run())) {
        *lock(&shared.panic) = Some(panic);
    }
}

extern "C" fn is_idle(owner: *mut c_void) -> i32 {
    // SAFETY: as in `on_grad`.
    let shared = unsafe { &*owner.cast::<Shared>() };
    i32::from(shared.is_over.load(Ordering::SeqCst))
}

extern "C" fn on_drop(owner: *mut c_void) {
    // The function is dropped with the `GradHook`, and here only if that was leaked.
    // SAFETY: the reference that `Arc::into_raw` made, given here once.
    let shared = unsafe { Arc::from_raw(owner.cast::<Shared>()) };
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(shared))) {
        std::mem::forget(panic);
    }
}
