//! Which batches of a stream there are, and which thread cuts the next one out of it.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::Cancellation;
use crate::loader::lock;

/// How long the cutting of one batch takes before threads that wait for their turn do other work. Short cuts are not
/// helped: threads that read single small samples from the same lanes would only be in each other's way.
const PATIENCE: Duration = Duration::from_millis(2);

/// The numbers of an epoch's batches.
pub(crate) struct Numbering {
    numbers: Mutex<Numbers>,
    /// Notified when another thread may cut.
    free: Condvar,
    /// Notified when a batch is finished: only then is it known whether it was empty, and so whether the epoch needs
    /// one more.
    settled: Condvar,
}

struct Numbers {
    /// Whether a thread is cutting a batch.
    cutting: bool,
    /// The number of the next batch.
    next: usize,
    /// The number at which the epoch ends: one more for each batch that lost all samples, so that every rank delivers
    /// the requested number of batches.
    limit: Option<usize>,
    /// How many batches are being made: each may still turn out to be empty.
    making: usize,
    /// Whether this epoch continues a pass that an earlier epoch broke off, and has not made a batch yet.
    rest: bool,
    ended: bool,
}

/// The right of one thread to cut the next batch.
pub(crate) struct Turn<'a> {
    numbering: &'a Numbering,
    pub(crate) number: usize,
    pub(crate) rest: bool,
    /// Whether no batch follows.
    pub(crate) ended: bool,
}

impl Numbering {
    /// Batches from `next` on, below `limit`.
    pub(crate) fn new(next: usize, limit: Option<usize>, rest: bool) -> Self {
        let numbers = Numbers { cutting: false, next, limit, making: 0, rest, ended: false };
        Self { numbers: Mutex::new(numbers), free: Condvar::new(), settled: Condvar::new() }
    }

    /// Waits until this thread may cut the next batch; `None` at the end, or when cancelled. Where that takes long it
    /// calls `meanwhile` again and again, as long as that returns true.
    pub(crate) fn due(&self, cancelled: &Cancellation, meanwhile: impl Fn() -> bool) -> Option<Turn<'_>> {
        let mut numbers = lock(&self.numbers);
        // The batch whose cutting takes long.
        let mut slow = None;
        // Cancellation is checked first: a thread that was cancelled while it cut leaves the lanes in the middle of a
        // batch.
        while !cancelled.is_cancelled() && !numbers.ended {
            let number = numbers.next;
            if numbers.cutting && slow == Some(number) {
                drop(numbers);
                slow = meanwhile().then_some(number);
                numbers = lock(&self.numbers);
            } else if numbers.cutting {
                let back = self.free.wait_timeout(numbers, PATIENCE).unwrap_or_else(PoisonError::into_inner);
                (numbers, slow) = (back.0, back.1.timed_out().then_some(number));
            } else if numbers.limit.is_none_or(|limit| numbers.next < limit) {
                numbers.cutting = true;
                return Some(Turn { numbering: self, number: numbers.next, rest: numbers.rest, ended: false });
            } else if numbers.making == 0 {
                return None;
            } else {
                // The threads that make batches notify when they are done, even if they were cancelled.
                numbers = self.settled.wait(numbers).unwrap_or_else(PoisonError::into_inner);
            }
        }
        None
    }

    /// Records that a batch has lost all samples, so that another is made in its place.
    pub(crate) fn one_more(&self) {
        let mut numbers = lock(&self.numbers);
        numbers.limit = numbers.limit.map(|limit| limit.saturating_add(1));
    }

    /// Records that a batch is no longer being made.
    pub(crate) fn finished(&self) {
        lock(&self.numbers).making -= 1;
        self.settled.notify_all();
    }
}

impl Turn<'_> {
    /// Records that the batch was cut, and is being made from now on.
    pub(crate) fn cut(&mut self) {
        self.rest = false;
        let mut numbers = lock(&self.numbering.numbers);
        (numbers.next, numbers.making) = (self.number + 1, numbers.making + 1);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut numbers = lock(&self.numbering.numbers);
        (numbers.cutting, numbers.rest) = (false, self.rest);
        numbers.ended |= self.ended;
        self.numbering.free.notify_one();
    }
}
