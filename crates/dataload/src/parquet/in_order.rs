//! Items made by several threads and taken in order: the windows of an epoch.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use crossbeam::channel::{Receiver, Sender, bounded, unbounded};

use crate::{Cancellation, DataError};

/// Makes the item with this number; it may give up once it is cancelled.
pub(super) type Make<T> = Arc<dyn Fn(usize, &Cancellation) -> Result<T, DataError> + Send + Sync>;

type Outcome<T> = Result<T, DataError>;

/// The items of a range of numbers, a few of which are made ahead.
pub(super) struct InOrder<T> {
    /// The numbers that have not been given to a thread.
    waiting: Range<usize>,
    /// Each item has its own channel, so items need no sorting, however long each takes.
    tasks: Option<Sender<(usize, Sender<Outcome<T>>)>>,
    coming: VecDeque<Receiver<Outcome<T>>>,
    cancelled: Cancellation,
    threads: Vec<JoinHandle<()>>,
}

impl<T: Send + 'static> InOrder<T> {
    /// Starts `threads` threads, which begin to make the first `ahead` items immediately.
    pub(super) fn start(numbers: Range<usize>, threads: usize, ahead: usize, make: Make<T>) -> Result<Self, DataError> {
        let (tasks, received) = unbounded::<(usize, Sender<Outcome<T>>)>();
        let (coming, cancelled) = (VecDeque::with_capacity(ahead), Cancellation::new());
        let threads = threads.min(numbers.len());
        let mut own = Self { waiting: numbers, tasks: Some(tasks), coming, cancelled, threads: Vec::new() };
        for worker in 0..threads {
            let (received, make, cancelled) = (received.clone(), make.clone(), own.cancelled.clone());
            let thread = Builder::new().name(format!("parquet-{worker}")).spawn(move || {
                for (number, taker) in received {
                    // Fails only when the receiver was dropped.
                    _ = taker.send(make(number, &cancelled));
                }
            });
            // On an error, dropping `own` joins the threads started before.
            own.threads.push(thread.map_err(|error| DataError::Spawn { worker, of: threads, error })?);
        }
        (0..ahead).for_each(|_| own.hand_out());
        Ok(own)
    }

    /// Waits for the next item; `None` after the last.
    pub(super) fn next(&mut self) -> Option<Outcome<T>> {
        let due = self.waiting.start - self.coming.len();
        let outcome = self.coming.pop_front()?.recv();
        self.hand_out();
        // The channel is closed only if the thread panicked.
        let message = || format!("it was decoding window {due} of the epoch, counted from 0");
        Some(outcome.unwrap_or_else(|_| Err(DataError::WorkerDied { message: message() })))
    }

    fn hand_out(&mut self) {
        match (self.waiting.next(), &self.tasks) {
            (Some(number), Some(tasks)) => {
                let (taker, receiver) = bounded(1);
                // Fails only when all threads have ended, which `next` reports.
                _ = tasks.send((number, taker));
                self.coming.push_back(receiver);
            }
            _ => self.tasks = None,
        }
    }
}

impl<T> Drop for InOrder<T> {
    /// Stops every thread at its next check, and joins it.
    fn drop(&mut self) {
        self.cancelled.cancel();
        self.tasks = None;
        self.coming.clear();
        for thread in self.threads.drain(..) {
            // A panic was already reported as a missing item.
            _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn items_arrive_in_order_and_a_panic_is_reported() {
        let make: Make<usize> = Arc::new(|number, _| match number {
            7 => panic!("planted"),
            5 => Err(DataError::EmptyBatch),
            number => Ok(number * number),
        });
        for threads in [1, 3, 20] {
            let mut things = InOrder::start(2..9, threads, threads + 1, make.clone()).unwrap();
            assert!((2..5).all(|number| things.next().unwrap().unwrap() == number * number));
            assert!(matches!(things.next(), Some(Err(DataError::EmptyBatch))));
            assert_eq!(things.next().unwrap().unwrap(), 36);
            assert!(things.next().unwrap().unwrap_err().to_string().contains("window 7 of the epoch"));
        }
        assert!(InOrder::start(3..3, 2, 2, make).unwrap().next().is_none());
    }

    #[test]
    fn items_that_are_not_needed_are_not_made() {
        let made = Arc::new(AtomicBool::new(false));
        let late = made.clone();
        let make: Make<()> = Arc::new(move |number, cancelled| {
            late.fetch_or(number > 4 && !cancelled.is_cancelled(), Ordering::Relaxed);
            Ok(())
        });
        let mut things = InOrder::start(0..1000, 2, 3, make).unwrap();
        things.next().unwrap().unwrap();
        drop(things);
        assert!(!made.load(Ordering::Relaxed));
    }
}
