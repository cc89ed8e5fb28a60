//! Communication hooks: Rust code instead of the reducer's all-reduce.

use std::any::Any;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use tch::Tensor;
use torch_sys::C_tensor;

use crate::raw_c10d as raw;
use crate::tensor_list::TensorList;

/// A bucket of gradients that is ready for communication.
///
/// # Source
/// `GradBucket`
#[derive(Debug)]
pub struct GradBucket {
    /// The bucket's index, in the order in which buckets are reduced.
    pub index: usize,
    /// Whether it is the last of this backward pass.
    pub is_last: bool,
    /// Its gradients, flat: this rank's, not divided by the number of ranks.
    pub buffer: Tensor,
    /// Views of the buffer, one per parameter.
    pub gradients: Vec<Tensor>,
    /// The parameters.
    pub parameters: Vec<Tensor>,
    /// With mixed precision, their gradients of earlier passes, which add up in full precision and are not in the buffer;
    /// undefined where there are none. Otherwise empty.
    pub earlier: Vec<Tensor>,
}

/// Called by a reducer instead of its all-reduce. Meant for `overdrive-ddp` only.
pub trait BucketHook: Send {
    /// Starts a bucket's communication.
    ///
    /// # Errors
    /// Any; backward then fails.
    fn start(&mut self, bucket: GradBucket) -> Result<(), Box<dyn std::error::Error + Send + Sync>>;

    /// The bucket's mean over ranks, flat: as many elements as its buffer has, contiguous, of its dtype and device.
    ///
    /// # Errors
    /// Any; backward then fails.
    fn finish(&mut self, index: usize) -> Result<Tensor, Box<dyn std::error::Error + Send + Sync>>;
}

/// How a hook has failed.
#[derive(Debug)]
pub(super) enum Failure {
    Error(Box<dyn std::error::Error + Send + Sync>),
    Panic(Box<dyn Any + Send>),
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Error(error) => error.fmt(f),
            Self::Panic(panic) => {
                let text = panic.downcast_ref::<String>().map(String::as_str);
                let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
                write!(f, "it panicked: {}", text.unwrap_or("with a value that is not a string"))
            }
        }
    }
}

/// A hook and its failures; shared with the reducer.
pub(super) struct Shared {
    hook: Mutex<Box<dyn BucketHook>>,
    failure: Mutex<Option<Failure>>,
    /// The first failure's message; stays when the failure itself is taken.
    first: OnceLock<String>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Hooks' panics are caught while the lock is held, so poisoning means nothing.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(super) fn new(hook: Box<dyn BucketHook>) -> Arc<Self> {
        Arc::new(Self { hook: Mutex::new(hook), failure: Mutex::new(None), first: OnceLock::new() })
    }

    /// The failure since the last call, if there was one.
    pub(super) fn take_failure(&self) -> Option<Failure> {
        lock(&self.failure).take()
    }

    /// The message of the very first failure.
    pub(super) fn first_failure(&self) -> Option<&str> {
        self.first.get().map(String::as_str)
    }

    /// Runs the hook, and keeps the first failure.
    fn run<T>(&self, call: impl FnOnce(&mut dyn BucketHook) -> Result<T, Failure>) -> Option<T> {
        let mut hook = lock(&self.hook);
        let failure = match catch_unwind(AssertUnwindSafe(|| call(hook.as_mut()))) {
            Ok(Ok(value)) => return Some(value),
            Ok(Err(failure)) => failure,
            Err(panic) => Failure::Panic(panic),
        };
        self.first.get_or_init(|| failure.to_string());
        lock(&self.failure).get_or_insert(failure);
        None
    }
}

pub(super) extern "C" fn on_start(owner: *mut c_void, lent: *const raw::Bucket) -> i32 {
    // SAFETY: `owner` came out of `Arc::into_raw`, and its reference is kept until the reducer drops its hook.
    let shared = unsafe { &*owner.cast::<Shared>() };
    // SAFETY: the C++ side passes a bucket whose four handles are ours from here on.
    let bucket = unsafe { take(&*lent) };
    let started = shared.run(|hook| {
        let bucket = bucket.map_err(|error| Failure::Error(Box::new(error)))?;
        hook.start(bucket).map_err(Failure::Error)
    });
    i32::from(started.is_none())
}

pub(super) extern "C" fn on_finish(owner: *mut c_void, index: usize) -> *mut C_tensor {
    // SAFETY: as in `on_start`.
    let shared = unsafe { &*owner.cast::<Shared>() };
    let tensor = shared.run(|hook| {
        let tensor = hook.finish(index).map_err(Failure::Error)?;
        // A separate handle for the C++ side, which deletes it; ours is dropped with `tensor`.
        // SAFETY: the tensor is live.
        let handle = unsafe { torch_sys::at_shallow_clone(tensor.as_ptr().cast_mut()) };
        Ok(handle)
    });
    tensor.unwrap_or(ptr::null_mut())
}

pub(super) extern "C" fn on_drop(owner: *mut c_void) {
    // SAFETY: the reference that `Arc::into_raw` made, given here once.
    let shared = unsafe { Arc::from_raw(owner.cast::<Shared>()) };
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(shared))) {
        std::mem::forget(panic);
    }
}

/// # Safety
/// The four handles are ours, and read once.
unsafe fn take(lent: &raw::Bucket) -> Result<GradBucket, crate::Error> {
    // SAFETY: as above.
    let [gradients, parameters, earlier] =
        [lent.gradients, lent.parameters, lent.earlier].map(|list| unsafe { TensorList::from_raw(list) });
    // SAFETY: as above.
    let buffer = unsafe { Tensor::from_ptr(lent.buffer) };
    Ok(GradBucket {
        index: lent.index,
        is_last: lent.is_last != 0,
        buffer,
        gradients: gradients?.to_vec()?,
        parameters: parameters?.to_vec()?,
        earlier: earlier?.to_vec()?,
    })
}
