//! What the crates do for a training loop, told to whoever records it.

use std::marker::PhantomData;
use std::sync::OnceLock;

use crate::Optimizer;

/// What a crate does for the thread that has called it.
#[non_exhaustive]
#[derive(Clone, Copy)]
pub enum Activity<'a> {
    /// A loader is asked for a batch. The number tells it from other loaders, over all its epochs.
    NextBatch(usize),
    /// A backward pass.
    Backward,
    /// An optimizer updates its parameters.
    OptimizerStep(&'a dyn Optimizer),
}

/// Is told what the crates do, on the thread that they do it for. What begins later ends earlier.
pub trait ActivityObserver: Sync {
    /// The activity begins.
    fn begins(&self, activity: Activity<'_>);

    /// The one that began last ends. `samples`: of the batch, where there is one and the loader has counted them.
    fn ends(&self, samples: Option<u64>);
}

/// How a crate that nobody calls says that it observes: by `inventory::submit!`. The first one is told.
pub struct ActivityObserverEntry(pub &'static dyn ActivityObserver);

inventory::collect!(ActivityObserverEntry);

/// Tells the observer that an activity begins, and that it ends when the guard is dropped.
///
/// Costs a read of a pointer where nobody observes.
pub fn activity<'a>(of: impl FnOnce() -> Activity<'a>) -> ActivityGuard {
    static OBSERVER: OnceLock<Option<&'static dyn ActivityObserver>> = OnceLock::new();
    let observer = *OBSERVER.get_or_init(|| inventory::iter::<ActivityObserverEntry>().next().map(|entry| entry.0));
    if let Some(observer) = observer {
        observer.begins(of());
    }
    ActivityGuard { observer, samples: None, _not_send: PhantomData }
}

/// An activity that goes on until this is dropped. Made by [`activity`].
#[must_use = "the activity ends when the guard is dropped"]
pub struct ActivityGuard {
    observer: Option<&'static dyn ActivityObserver>,
    samples: Option<u64>,
    /// It ends on the thread that it began on.
    _not_send: PhantomData<*const ()>,
}

impl ActivityGuard {
    /// Says how many samples there are in the batch.
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
