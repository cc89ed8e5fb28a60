//! Notifies an observer, such as the profiler's recorder, of batches, backward passes and optimizer steps.

use std::marker::PhantomData;
use std::sync::OnceLock;

use crate::Optimizer;

/// Work that a crate does on the calling thread.
#[non_exhaustive]
#[derive(Clone, Copy)]
pub enum Activity<'a> {
    /// A loader is asked for a batch. The number identifies the loader and is the same in all its epochs.
    NextBatch(usize),
    /// A backward pass.
    Backward,
    /// An optimizer updates its parameters.
    OptimizerStep(&'a dyn Optimizer),
}

/// Called when an activity begins and ends, on the thread that runs it. Activities nest: the last to begin ends first.
pub trait ActivityObserver: Sync {
    /// An activity begins.
    fn begins(&self, activity: Activity<'_>);

    /// The activity that began last on this thread ends. `samples`: the batch's size, where the loader has counted it.
    fn ends(&self, samples: Option<u64>);
}

/// Registers an observer with `inventory::submit!`, so that no code has to call its crate. Only the first entry is
/// used.
pub struct ActivityObserverEntry(pub &'static dyn ActivityObserver);

inventory::collect!(ActivityObserverEntry);

/// Reports to the observer that an activity begins, and that it ends when the guard is dropped.
///
/// Costs one pointer read where no observer is registered.
pub fn activity<'a>(of: impl FnOnce() -> Activity<'a>) -> ActivityGuard {
    static OBSERVER: OnceLock<Option<&'static dyn ActivityObserver>> = OnceLock::new();
    let observer = *OBSERVER.get_or_init(|| inventory::iter::<ActivityObserverEntry>().next().map(|entry| entry.0));
    if let Some(observer) = observer {
        observer.begins(of());
    }
    ActivityGuard { observer, samples: None, _not_send: PhantomData }
}

/// An activity that lasts until this is dropped. Made by [`activity`].
#[must_use = "the activity ends when the guard is dropped"]
pub struct ActivityGuard {
    observer: Option<&'static dyn ActivityObserver>,
    samples: Option<u64>,
    /// The activity must end on the thread where it began.
    _not_send: PhantomData<*const ()>,
}

impl ActivityGuard {
    /// Sets how many samples the batch has.
    pub fn set_samples(&mut self, samples: u64) {
        self.samples = Some(samples);
    }
}

impl Drop for ActivityGuard {
    fn drop(&mut self) {
        if let Some(observer) = self.observer {
            observer.ends(self.samples);
        }
    }
}

impl std::fmt::Debug for Activity<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NextBatch(loader) => f.debug_tuple("NextBatch").field(loader).finish(),
            Self::Backward => f.write_str("Backward"),
            Self::OptimizerStep(optimizer) => f.debug_tuple("OptimizerStep").field(&optimizer.id()).finish(),
        }
    }
}

impl std::fmt::Debug for ActivityGuard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ActivityGuard").finish_non_exhaustive()
    }
}
