//! The second run.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};

use overdrive_core::Recomputing;
use overdrive_ffi::autograd::BoxError;
use overdrive_ffi::keep::Keeper;
use overdrive_ffi::saved_tensors::{Hooks, HooksGuard, Packed};
use tch::Tensor;

use super::frame::{Frame, Pass};
use crate::back_off::text_of;
use crate::error::MemoryError;

impl Frame {
    /// Runs the function again, and keeps what it saves for this backward pass.
    pub(super) fn recompute(self: &Arc<Self>, pass: Pass) -> Result<(), BoxError> {
        if !self.may_run() {
            return Err(MemoryError::OtherThread { scope: self.scope.clone() }.into());
        }
        if let Some(difference) = self.changed_leaf()? {
            return Err(self.changed(difference));
        }
        let inputs = self.inputs().map_err(|error| format!("{}: {error}", self.scope))?;
        let (saved, is_over, changed) = (AtomicUsize::new(0), AtomicBool::new(false), Mutex::default());
        let again = Arc::new(Again { frame: Arc::clone(self), pass, saved, is_over, changed });
        let result = {
            let entered = self.context.enter(|device| self.uses(device));
            let _context = entered.map_err(|error| format!("{}: {error}", self.scope))?;
            let _hooks = HooksGuard::new(again.clone())?;
            let _kept = self.keeper.as_ref().map(Keeper::reuse).transpose()?;
            let _quiet = Quiet::new();
            let _again = Recomputing::begin();
            catch_unwind(AssertUnwindSafe(|| tch::with_grad(|| (self.again)(inputs))))
        };
        if again.is_over.load(Ordering::SeqCst) {
            return Ok(());
        }
        // The function has failed because of it.
        if let Some(difference) = again.changed().take() {
            return Err(self.changed(difference));
        }
        match result {
            Err(panic) => match text_of(&*panic) {
                Some(text) => resume_unwind(Box::new(format!("{}: {text}", self.scope))),
                None => resume_unwind(panic),
            },
            Ok(Err(error)) => return Err(format!("{}: {error}", self.scope).into()),
            Ok(Ok(())) => {}
        }
        let (before, now) = (self.len(), again.saved.load(Ordering::SeqCst));
        if now != before && self.is_forward_done() {
            return Err(self.changed(format!("it saved {before} tensors, and then {now}")));
        }
        Ok(())
    }
}

/// The hooks of the second run.
struct Again {
    frame: Arc<Frame>,
    pass: Pass,
    /// How many tensors were saved so far.
    saved: AtomicUsize,
    /// Whether all were, and the run is ended.
    is_over: AtomicBool,
    /// What is different.
    changed: Mutex<Option<String>>,
}

impl Again {
    fn changed(&self) -> MutexGuard<'_, Option<String>> {
        self.changed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_changed(&self, difference: String) -> BoxError {
        // The panic that follows, if it is one of tch's, says nothing more.
        IS_ENDING.set(true);
        self.changed().get_or_insert(difference).clone().into()
    }
}

impl Hooks for Again {
    fn pack(&self, tensor: &Tensor) -> Result<Option<Box<dyn Packed>>, BoxError> {
        let number = self.saved.fetch_add(1, Ordering::SeqCst);
        let wanted = self.frame.len();
        if number >= wanted && self.frame.is_forward_done() && !self.is_over.load(Ordering::SeqCst) {
            return Err(self.has_changed(format!("it saved {wanted} tensors, and then more")));
        }
        if let Some(difference) = self.frame.fill(number, self.pass, tensor)? {
            return Err(self.has_changed(difference));
        }
        if self.frame.early_stop && number + 1 >= wanted {
            self.is_over.store(true, Ordering::SeqCst);
            IS_ENDING.set(true);
            return Err("all that is needed was computed again".into());
        }
        // Kept as it is, for backward passes within the function.
        Ok(None)
    }
}

thread_local! {
    /// Whether a panic on this thread ends a second run, and is no error.
    static IS_ENDING: Cell<bool> = const { Cell::new(false) };
}

/// Keeps the panic that ends a second run from being printed: tch's operators panic when they fail.
struct Quiet {
    /// Of the second run around this one.
    before: bool,
}

impl Quiet {
    fn new() -> Self {
        static INSTALLED: Once = Once::new();
        INSTALLED.call_once(|| {
            let print = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                if !IS_ENDING.get() {
                    print(panic);
                }
            }));
        });
        Self { before: IS_ENDING.replace(false) }
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        IS_ENDING.set(self.before);
    }
}
