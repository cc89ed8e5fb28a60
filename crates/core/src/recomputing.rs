//! Whether a part of the forward pass runs for a second time.

use std::cell::Cell;
use std::marker::PhantomData;

thread_local! {
    static IS_RECOMPUTING: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread computes a part of the forward pass again, for its backward pass. What counts batches or
/// averages over them, such as running statistics, should leave them as they are then.
pub fn is_recomputing() -> bool {
    IS_RECOMPUTING.get()
}

/// The calling thread computes again until this is dropped.
#[must_use = "ends when the guard is dropped"]
#[derive(Debug)]
pub struct Recomputing {
    before: bool,
    _not_send: PhantomData<*const ()>,
}

impl Recomputing {
    /// Begins.
    pub fn begin() -> Self {
        Self { before: IS_RECOMPUTING.replace(true), _not_send: PhantomData }
    }
}

impl Drop for Recomputing {
    fn drop(&mut self) {
        IS_RECOMPUTING.set(self.before);
    }
}
