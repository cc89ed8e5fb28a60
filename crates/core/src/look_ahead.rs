//! Batches that are taken before they are used, and how their loaders learn when they are used.

use std::cell::RefCell;

type Release = Box<dyn FnOnce() + Send>;

thread_local! {
    /// The loaders' callbacks for the batches taken since the innermost [`take_ahead`] began; `None` outside of one.
    static TAKEN: RefCell<Option<Vec<Release>>> = const { RefCell::new(None) };
}

/// Batches that were taken ahead of their use. Their loaders count them as trained on at [`hand_out`](Self::hand_out),
/// or never if this is dropped.
#[must_use = "the loader counts the batch when it is handed out"]
#[derive(Default)]
pub struct HeldBatches(Vec<Release>);

/// Takes an iterator's next batch before it is used, for instance to see whether there is one.
///
/// The loader behind the iterator, through any adapters, counts the batch in its state only when it is handed out. So a
/// run that is saved in between and resumed trains on every batch exactly once.
///
/// ```
/// # use overdrive_core::take_ahead;
/// # let mut batches = [1, 2].into_iter();
/// let (batch, held) = take_ahead(|| batches.next());
/// // .. later, when it is the batch's turn
/// held.hand_out();
/// ```
pub fn take_ahead<T>(next: impl FnOnce() -> T) -> (T, HeldBatches) {
    // A guard, so that a panic restores it too.
    struct Outer(Option<Vec<Release>>);
    impl Drop for Outer {
        fn drop(&mut self) {
            TAKEN.set(self.0.take());
        }
    }
    let outer = Outer(TAKEN.replace(Some(Vec::new())));
    let item = next();
    let held = HeldBatches(TAKEN.take().unwrap_or_default());
    drop(outer);
    (item, held)
}

/// For loaders: whether the batch that this thread asks for is taken ahead of its use.
pub fn is_taken_ahead() -> bool {
    TAKEN.with_borrow(Option::is_some)
}

/// For loaders: registers what to do when the batch being returned is handed out. Runs at once if it is not taken
/// ahead.
pub fn when_handed_out(release: impl FnOnce() + Send + 'static) {
    hand_out(Box::new(release));
}

fn hand_out(release: Release) {
    let kept = TAKEN.with_borrow_mut(|taken| match taken {
        Some(taken) => {
            taken.push(release);
            None
        }
        None => Some(release),
    });
    // After the borrow ends, because it may call back into this module.
    if let Some(release) = kept {
        release();
    }
}

impl HeldBatches {
    /// Marks the batches as used. Within another [`take_ahead`] they stay held by that one.
    pub fn hand_out(self) {
        self.0.into_iter().for_each(hand_out);
    }
}

impl std::fmt::Debug for HeldBatches {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("HeldBatches").field(&self.0.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Numbers, and how many of them their loader counts as used.
    fn loader() -> (impl Iterator<Item = usize>, Arc<AtomicUsize>) {
        let used = Arc::new(AtomicUsize::new(0));
        let count = used.clone();
        let numbers = (0..5).inspect(move |_| {
            let count = count.clone();
            when_handed_out(move || {
                count.fetch_add(1, Ordering::Relaxed);
            });
        });
        (numbers, used)
    }

    #[test]
    fn a_batch_counts_when_it_is_handed_out() {
        let (mut numbers, used) = loader();
        let used = || used.load(Ordering::Relaxed);
        assert_eq!((numbers.next(), used()), (Some(0), 1), "outside it counts at once");
        let (taken, held) = take_ahead(|| numbers.next());
        assert_eq!((taken, used(), is_taken_ahead()), (Some(1), 1, false));
        held.hand_out();
        assert_eq!(used(), 2);
        let (_, dropped) = take_ahead(|| numbers.next());
        drop(dropped);
        assert_eq!(used(), 2, "never used");
    }

    #[test]
    fn a_batch_of_a_nested_look_ahead_stays_held_by_the_outer_one() {
        let (mut numbers, used) = loader();
        let used = || used.load(Ordering::Relaxed);
        let (_, inner) = take_ahead(|| numbers.next());
        let ((), outer) = take_ahead(|| inner.hand_out());
        assert_eq!(used(), 0);
        outer.hand_out();
        assert_eq!(used(), 1);
    }

    #[test]
    fn a_panic_ends_the_look_ahead() {
        let panicked = std::panic::catch_unwind(|| take_ahead(|| panic!("in a loader")));
        assert!(panicked.is_err() && !is_taken_ahead());
    }
}
