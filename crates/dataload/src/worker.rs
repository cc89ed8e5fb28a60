//! The threads of one epoch.
//!
//! Threads live as long as the epoch that they work for. So nothing is left to drain or to reset after a break, an
//! error or a panic, and an idle loader holds no thread; starting one takes some tens of microseconds.
//!
//! Batches are handed out one by one to whoever is free, and put back in order on arrival. At most `in_flight` of them
//! are handed out and not yet taken by the consumer: that bounds memory, and no thread ever blocks on a full queue.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};

use crossbeam::channel::{Receiver, Sender, bounded};

use crate::DataError;
use crate::reorder::Reorder;

type Outcome<B> = Result<B, DataError>;

/// Makes the batch with the given number, or nothing when it was told to stop.
pub(crate) type Assemble<B> = Arc<dyn Fn(usize, &AtomicBool) -> Option<Outcome<B>> + Send + Sync>;

pub(crate) struct Workers<B> {
    /// The numbers that have not been handed out.
    waiting: Range<usize>,
    /// Numbers to the threads; closed once the last has been handed out, so that the threads end.
    tasks: Option<Sender<usize>>,
    results: Receiver<(usize, Outcome<B>)>,
    arrived: Reorder<Outcome<B>>,
    cancelled: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl<B: Send + 'static> Workers<B> {
    /// Starts `count` threads, which begin with the first `in_flight` of `batches` at once.
    pub(crate) fn spawn(
        count: usize,
        in_flight: usize,
        batches: usize,
        assemble: Assemble<B>,
    ) -> Result<Self, DataError> {
        let in_flight = in_flight.min(batches);
        let (tasks, numbers) = bounded(in_flight);
        let (outcomes, results) = bounded(in_flight);
        let mut workers = Self {
            waiting: 0..batches,
            tasks: Some(tasks),
            results,
            arrived: Reorder::new(),
            cancelled: Arc::default(),
            threads: Vec::with_capacity(count.min(batches)),
        };
        // When a thread cannot be started, dropping `workers` joins those before it.
        for worker in 0..count.min(batches) {
            let thread = workers.start_thread(worker, numbers.clone(), outcomes.clone(), assemble.clone());
            workers.threads.push(thread.map_err(|error| DataError::Spawn { worker, of: count, error })?);
        }
        (0..in_flight).for_each(|_| workers.hand_out());
        Ok(workers)
    }

    fn start_thread(
        &self,
        worker: usize,
        numbers: Receiver<usize>,
        outcomes: Sender<(usize, Outcome<B>)>,
        assemble: Assemble<B>,
    ) -> io::Result<JoinHandle<()>> {
        let cancelled = self.cancelled.clone();
        Builder::new().name(format!("dataload-{worker}")).spawn(move || {
            for number in numbers {
                let Some(outcome) = assemble(number, &cancelled) else { break };
                if outcomes.send((number, outcome)).is_err() {
                    break;
                }
            }
        })
    }

    /// Waits for the batch that is due, and hands out one more.
    pub(crate) fn receive(&mut self) -> Outcome<B> {
        loop {
            if let Some(outcome) = self.arrived.take() {
                self.hand_out();
                return outcome;
            }
            match self.results.recv() {
                Ok((number, outcome)) => self.arrived.put(number, outcome),
                Err(_) => return Err(DataError::WorkersGone { batch: self.arrived.due() }),
            }
        }
    }

    fn hand_out(&mut self) {
        match (self.waiting.next(), &self.tasks) {
            // Fails only when every thread is gone, which `receive` reports.
            (Some(number), Some(tasks)) => _ = tasks.send(number),
            _ => self.tasks = None,
        }
    }
}

impl<B> Drop for Workers<B> {
    /// Stops every thread after the sample that it is reading, and joins it.
    fn drop(&mut self) {
        self.cancelled.store(true, Ordering::Relaxed);
        self.tasks = None;
        for thread in self.threads.drain(..) {
            // A panic in user code has been caught and delivered; what is left could only be one in dropping a batch.
            _ = thread.join();
        }
    }
}
