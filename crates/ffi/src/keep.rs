//! Results of chosen operators, kept in one run of a function and reused in the next.
//!
//! Users call `overdrive_memory`.

use std::ffi::{CStr, c_char, c_void};
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};

use crate::callback::drop_box;
use crate::error::{Error, check};
use crate::raw_keep as raw;

/// Decides which results are kept.
pub trait Keeps: Send + Sync {
    /// Whether a call's result is kept.
    fn keeps(&self, call: Call<'_>) -> bool;

    /// Whether [`ran`](Self::ran) is to be called.
    fn measures(&self) -> bool {
        false
    }

    /// Called in the first run for each result of a call that is not kept, right after [`keeps`](Self::keeps) was asked
    /// about that call. The host waits for operators of a CUDA device, so that their times are right.
    fn ran(&self, _ran: Ran) {}
}

/// A call of an operator whose result can be kept.
#[derive(Clone, Copy, Debug)]
pub struct Call<'c> {
    /// How many calls of this operator there were before in this run.
    pub number: usize,
    /// `aten::mm`
    pub name: &'c str,
    /// Empty for the default.
    pub overload: &'c str,
}

/// One result of a call, and what the call took.
#[derive(Clone, Copy, Debug)]
pub struct Ran {
    /// How long the call took.
    pub nanoseconds: u64,
    /// Where the result's memory is, as in [`storage`](crate::storage).
    pub address: usize,
    /// The size of that memory.
    pub bytes: usize,
}

impl<F: Fn(&str, &str) -> bool + Send + Sync> Keeps for F {
    fn keeps(&self, call: Call<'_>) -> bool {
        self(call.name, call.overload)
    }
}

type Owner = Box<dyn Keeps>;

/// Keeps results of the first run of a function for the next ones.
///
/// Only results that are new tensors are kept: operators that write, or return views or lists, always run. An operator
/// that draws random numbers leaves the generator as it did in the first run.
pub struct Keeper(NonNull<raw::Keeper>);

// SAFETY: the C++ side locks what it changes, and what belongs to a thread is in the thread's own list.
unsafe impl Send for Keeper {}
// SAFETY: as above.
unsafe impl Sync for Keeper {}

/// A run of the calling thread, which lasts until this is dropped.
#[must_use = "the run ends when the guard is dropped"]
#[derive(Debug)]
pub struct KeepRun<'k> {
    keeper: &'k Keeper,
    _not_send: PhantomData<*const ()>,
}

impl Keeper {
    /// A keeper without results.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn new(keeps: impl Keeps + 'static) -> Result<Self, Error> {
        let ran: Option<extern "C" fn(_, _, _, _)> = if keeps.measures() { Some(on_result) } else { None };
        let owner: Owner = Box::new(keeps);
        let owner = Box::into_raw(Box::new(owner)).cast::<c_void>();
        let mut out = ptr::null_mut();
        // SAFETY: the C++ side drops `owner`, once, also on failure; `out` lives through the call.
        check(|err| unsafe { raw::od_keeper_new(owner, on_operator, ran, drop_box::<Owner>, &mut out, err) })?;
        NonNull::new(out).map(Self).ok_or_else(|| Error::refused("libtorch returned no keeper"))
    }

    /// Begins the run whose results are kept.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn keep(&self) -> Result<KeepRun<'_>, Error> {
        self.begin(false)
    }

    /// Begins a run that takes the kept results in place of running their operators. Calls are numbered from 0 again.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn reuse(&self) -> Result<KeepRun<'_>, Error> {
        self.begin(true)
    }

    fn begin(&self, reuse: bool) -> Result<KeepRun<'_>, Error> {
        // SAFETY: the keeper is live, and outlives the run.
        check(|err| unsafe { raw::od_keeper_begin(self.0.as_ptr(), i32::from(reuse), err) })?;
        Ok(KeepRun { keeper: self, _not_send: PhantomData })
    }

    /// Marks all results that were kept so far as needed: [`finish`](Self::finish) frees the later ones.
    pub fn need(&self) {
        // SAFETY: the keeper is live.
        unsafe { raw::od_keeper_need(self.0.as_ptr()) }
    }

    /// The bytes of the kept results, whose memory other tensors may share.
    pub fn bytes(&self) -> usize {
        // SAFETY: the keeper is live.
        unsafe { raw::od_keeper_bytes(self.0.as_ptr()) }
    }

    /// Frees the results that are not needed, and those that were changed in place since they were kept.
    pub fn finish(&self) {
        // SAFETY: the keeper is live.
        unsafe { raw::od_keeper_finish(self.0.as_ptr()) }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // SAFETY: the keeper is live, and no run borrows it.
        unsafe { raw::od_keeper_free(self.0.as_ptr()) }
    }
}

impl Drop for KeepRun<'_> {
    fn drop(&mut self) {
        // SAFETY: the keeper is live. This is the thread that began the run, as it is not `Send`.
        unsafe { raw::od_keeper_end(self.keeper.0.as_ptr()) }
    }
}

impl std::fmt::Debug for Keeper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Keeper")
    }
}

extern "C" fn on_operator(owner: *mut c_void, number: usize, name: *const c_char, overload: *const c_char) -> i32 {
    // SAFETY: `owner` was made of such a box, and the strings are the caller's.
    let (keeps, name, overload) =
        unsafe { (&*owner.cast::<Owner>(), CStr::from_ptr(name).to_str(), CStr::from_ptr(overload).to_str()) };
    let (Ok(name), Ok(overload)) = (name, overload) else { return 0 };
    let asked = AssertUnwindSafe(|| keeps.keeps(Call { number, name, overload }));
    i32::from(catch_unwind(asked).unwrap_or(false))
}

extern "C" fn on_result(owner: *mut c_void, nanoseconds: u64, result: *const c_void, bytes: usize) {
    // SAFETY: `owner` was made of such a box.
    let keeps = unsafe { &*owner.cast::<Owner>() };
    let ran = Ran { nanoseconds, address: result.addr(), bytes };
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| keeps.ran(ran))) {
        std::mem::forget(panic);
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Tensor};

    use super::*;

    #[test]
    fn results_that_are_not_needed_or_changed_are_freed() {
        let x = Tensor::rand([4, 4], (Kind::Float, Device::Cpu));
        let keeper = Keeper::new(|name: &str, _: &str| name == "aten::mm").unwrap();
        {
            let _run = keeper.keep().unwrap();
            let (needed, mut changed) = (x.mm(&x), x.mm(&x));
            assert_eq!(keeper.bytes(), 128);
            let _ = changed.relu_();
            keeper.need();
            let _ = (needed, x.mm(&x));
        }
        let _ = x.mm(&x);
        assert_eq!(keeper.bytes(), 192);
        keeper.finish();
        assert_eq!(keeper.bytes(), 64);
    }

    #[test]
    fn runs_end_in_any_order_and_only_on_their_thread() {
        let x = Tensor::rand([4, 4], (Kind::Float, Device::Cpu));
        let keepers = [0, 1].map(|_| Keeper::new(|name: &str, _: &str| name == "aten::mm").unwrap());
        let [first, second] = [&keepers[0], &keepers[1]].map(|keeper| keeper.keep().unwrap());
        drop(first);
        let _ = x.mm(&x);
        let other = x.shallow_clone();
        let _ = std::thread::spawn(move || other.mm(&other)).join().unwrap();
        drop(second);
        let _ = x.mm(&x);
        assert_eq!(keepers.each_ref().map(Keeper::bytes), [0, 64]);
    }

    #[test]
    fn a_run_that_is_never_ended_outlives_its_keeper() {
        std::thread::spawn(|| {
            let keeper = Keeper::new(|_: &str, _: &str| true).unwrap();
            std::mem::forget(keeper.keep().unwrap());
            drop(keeper);
            let x = Tensor::rand([4, 4], (Kind::Float, Device::Cpu));
            assert_eq!(x.mm(&x).size(), [4, 4]);
        })
        .join()
        .unwrap();
    }
}
