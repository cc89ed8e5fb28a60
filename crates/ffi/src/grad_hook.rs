//! What is to happen when a parameter's gradient is complete.

use std::any::Any;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{self, ThreadId};

use tch::Tensor;

use crate::error::{Error, check};
use crate::raw;

/// Calls a function whenever a tensor's gradient is complete, until this is dropped: when a backward pass has added to it,
/// or, where a reducer averages it over ranks, at the end of the pass that did. A pass that leaves such a gradient local
/// calls nothing.
///
/// A tensor has room for one. The function runs on the thread that computes the gradient, which is the caller's for a
/// CPU and one of libtorch's for a GPU, and may read and free the gradient. A backward pass that the function itself runs
/// does not call it again.
///
/// Dropping never waits, so that the function may do it: a call under way on any thread ends first.
///
/// # Source
/// `torch.Tensor.register_post_accumulate_grad_hook`
pub struct GradHook(Arc<Shared>);

type Call = Box<dyn FnMut() + Send>;

#[derive(Default)]
struct Shared {
    /// None once the hook is dropped. libtorch keeps its end for as long as the tensor lives, so that nothing is taken
    /// from under a backward pass on another thread.
    call: Mutex<Option<Call>>,
    /// The thread that runs the function.
    runs_on: Mutex<Option<ThreadId>>,
    /// The hook is dropped; whoever has the lock of `call` then, or comes next, takes the function out.
    is_over: AtomicBool,
    /// What the function panicked with.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Panics of the function are caught inside the lock, so that a poisoned one tells nothing new.
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
        self.let_go_if_over();
    }

    /// Lets go of the function when it is not needed any more and does not run. One that runs is let go behind it.
    fn let_go_if_over(&self) {
        if !self.is_over.load(Ordering::SeqCst) {
            return;
        }
        let call = match self.call.try_lock() {
            Ok(mut call) => call.take(),
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner().take(),
            Err(TryLockError::WouldBlock) => None,
        };
        // Outside of the lock: what it holds may do anything when it goes.
        drop(call);
    }
}

impl GradHook {
    /// Calls `call` from now on.
    ///
    /// # Errors
    /// When `tensor` is no leaf that requires a gradient, or has such a hook already, and within a backward pass if a graph
    /// has the tensor in it.
    ///
    /// # Syncs
    /// Where a graph has the tensor in it, waits for the backward passes of other threads: one may be about to call the hook
    /// that was there before.
    pub fn new(tensor: &Tensor, call: impl FnMut() + Send + 'static) -> Result<Self, Error> {
        let shared = Arc::new(Shared { call: Mutex::new(Some(Box::new(call))), ..Shared::default() });
        let owner = Arc::into_raw(shared.clone()).cast_mut().cast::<c_void>();
        // SAFETY: the tensor lives through the call. `owner` is a counted reference that the C++ side gives to `on_drop`
        // once, on success and on failure, and to the others before that alone.
        check(|err| unsafe { raw::od_grad_hook_set(tensor.as_ptr(), owner, on_grad, on_drop, is_idle, err) })?;
        Ok(Self(shared))
    }

    /// Goes on with the panic of a call since, if there was one: it could not pass through libtorch.
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
        self.0.let_go_if_over();
    }
}

impl std::fmt::Debug for GradHook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("GradHook")
    }
}

extern "C" fn on_grad(owner: *mut c_void) {
    // SAFETY: `owner` came out of `Arc::into_raw` above, and its reference is not given back before the hook goes.
    let shared = unsafe { &*owner.cast::<Shared>() };
    // The function's panics are caught within; here, those of what it holds when that goes.
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
    // What the function holds goes with the `GradHook`; only if that was never dropped does it go here.
    // SAFETY: the reference that `Arc::into_raw` made, given here once.
    let shared = unsafe { Arc::from_raw(owner.cast::<Shared>()) };
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(shared))) {
        std::mem::forget(panic);
    }
}
