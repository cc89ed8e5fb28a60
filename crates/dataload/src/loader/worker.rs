//! The threads of one epoch.
//!
//! Threads live as long as their epoch. So there is nothing to drain or reset when the training loop stops early, or
//! after an error or a panic, and an idle loader has no threads; starting one takes tens of microseconds.
//!
//! A thread makes one batch per permit. There are never more than `in_flight` permits whose batch the training loop has
//! not taken yet, and a thread with a permit waits for room in the budget of bytes. That bounds memory, and the mailbox
//! needs no bound, so no thread ever blocks in sending.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam::channel::{Sender, unbounded};

use crate::loader::budget::Budget;
use crate::loader::mailbox::Mailbox;
use crate::loader::reorder::Reorder;
use crate::loader::serve::{Common, Message, Permit};
use crate::loader::stats::Counters;
use crate::loader::thread::{WorkerInit, begin};
use crate::loader::turns::{AtWork, ComputeThreads};
use crate::loader::work::{EpochWork, Made};
use crate::{Cancellation, DataError};

/// The most batches that may be loaded ahead, whatever the options.
pub(crate) const MOST_IN_FLIGHT: usize = 1 << 16;

/// With `in_order(false)`, how far the numbers of permitted batches may run ahead of the first batch that was not
/// delivered.
const MOST_AHEAD: usize = 1024;

/// How long a dropped epoch waits for its threads, as long as PyTorch's loader waits for its workers.
const GRACE: Duration = Duration::from_secs(5);

/// A training loop that has to wait wakes for as many batches as are made in this time, or for one that takes longer.
const BURST: Duration = Duration::from_micros(400);

/// The options of an epoch's threads.
#[derive(Clone)]
pub(crate) struct WorkerOptions {
    pub(crate) in_order: bool,
    pub(crate) timeout: Option<Duration>,
    pub(crate) init: Option<WorkerInit>,
    /// The workers' nice value, see `setpriority(2)`.
    pub(crate) nice: i32,
    /// Set if workers rest between making all batches ahead.
    pub(crate) compute_threads: Option<ComputeThreads>,
    /// Without workers, how many threads read ahead for the calling thread.
    pub(crate) readers: usize,
    pub(crate) counters: Arc<Counters>,
}

pub(crate) struct Workers<B> {
    common: Arc<Common<B>>,
    options: WorkerOptions,
    /// `None` once no batch is left to make.
    permits: Option<Sender<Permit>>,
    /// Those that were taken out of the mailbox.
    messages: VecDeque<Message<B>>,
    /// With `in_order`, batches that wait for their turn.
    arrived: Reorder<Made<B>>,
    /// The number of the first batch that was not delivered to the training loop.
    first_undelivered: usize,
    /// The number of the next batch to be permitted.
    granted_to: usize,
    /// How many batches may be permitted and not yet taken.
    in_flight: usize,
    /// How many are permitted and not yet taken.
    outstanding: usize,
    /// Threads that have not reported their end; `wanted` excludes those that were told to end.
    alive: usize,
    wanted: usize,
    started: usize,
    threads: Vec<JoinHandle<()>>,
    /// Whether a batch timed out, so that a thread is stuck in the user's code.
    stuck: bool,
}

impl<B: Send + 'static> Workers<B> {
    /// Starts `count` threads, which begin to make the first `in_flight` batches immediately; `first` is the number of
    /// the first batch.
    pub(crate) fn spawn(
        work: Arc<dyn EpochWork<B>>,
        count: usize,
        in_flight: usize,
        first: usize,
        options: WorkerOptions,
        budget: Option<Budget<B>>,
    ) -> Result<Self, DataError> {
        let (permits, granted) = unbounded();
        let common = Common {
            work,
            granted,
            mailbox: Mailbox::new(),
            unreceived: AtomicUsize::new(0),
            budget,
            at_work: AtWork::default(),
            cancelled: Cancellation::new(),
        };
        let mut workers = Self {
            common: Arc::new(common),
            options,
            permits: Some(permits),
            messages: VecDeque::new(),
            arrived: Reorder::starting_at(first),
            first_undelivered: first,
            granted_to: first,
            in_flight: 0,
            outstanding: 0,
            alive: 0,
            wanted: 0,
            started: 0,
            threads: Vec::with_capacity(count),
            stuck: false,
        };
        // When a thread cannot be started, dropping `workers` joins the ones already started.
        workers.resize(count, in_flight)?;
        Ok(workers)
    }

    /// Changes the number of threads and of batches loaded ahead while the epoch runs.
    pub(crate) fn resize(&mut self, count: usize, in_flight: usize) -> Result<(), DataError> {
        if in_flight > 0 {
            self.common.work.shared_by(count);
        }
        while self.wanted < count {
            self.threads.push(self.start_thread(self.started).map_err(|error| DataError::Spawn {
                worker: self.started,
                of: count,
                error,
            })?);
            self.started += 1;
            self.alive += 1;
            self.wanted += 1;
        }
        while self.wanted > count {
            self.send(Permit::End);
            self.wanted -= 1;
        }
        self.in_flight = in_flight.min(MOST_IN_FLIGHT);
        self.grant();
        Ok(())
    }

    /// How many finished batches have not been taken.
    pub(crate) fn ready(&self) -> usize {
        self.common.unreceived.load(Ordering::Relaxed) + self.arrived.waiting()
    }

    fn start_thread(&self, worker: usize) -> io::Result<JoinHandle<()>> {
        let (common, nice, init) = (self.common.clone(), self.options.nice, self.options.init.clone());
        Builder::new().name(format!("dataload-{worker}")).spawn(move || {
            let mut end_report = EndReport { mailbox: &common.mailbox, done: false, error: None };
            match begin(worker, nice, init.as_ref()).and_then(|()| common.serve()) {
                Ok(done) => end_report.done = done,
                Err(error) => {
                    tracing::debug!(%error, worker, "a worker ends");
                    end_report.error = Some(error);
                }
            }
        })
    }

    /// Waits for the next batch, of which [`taken`](Self::taken) has to be told; `None` at the end of the epoch.
    /// `first_undelivered` is the number of the first batch that was not delivered to the training loop.
    pub(crate) fn receive(&mut self, first_undelivered: usize) -> Result<Option<Made<B>>, DataError> {
        let asked = Instant::now();
        self.first_undelivered = first_undelivered;
        self.grant();
        loop {
            if let Some(made) = self.arrived.take() {
                return Ok(Some(made));
            }
            if self.alive == 0 && self.messages.is_empty() {
                let unfinished = self.permits.is_some() || self.arrived.waiting() > 0;
                return if unfinished { Err(DataError::WorkersGone { batch: self.due() }) } else { Ok(None) };
            }
            match self.next_message(asked)? {
                Message::Made(made) => {
                    self.common.unreceived.fetch_sub(1, Ordering::Relaxed);
                    match self.options.in_order {
                        true => self.arrived.put(made.number, made),
                        false => return Ok(Some(made)),
                    }
                }
                Message::Ended { done, error } => {
                    self.alive -= 1;
                    if let Some(error) = error {
                        return Err(error);
                    }
                    if done {
                        self.permits = None;
                    }
                }
            }
        }
    }

    fn next_message(&mut self, asked: Instant) -> Result<Message<B>, DataError> {
        if let Some(message) = self.messages.pop_front() {
            return Ok(message);
        }
        let deadline = self.options.timeout.and_then(|timeout| asked.checked_add(timeout));
        let several = self.several();
        self.common.mailbox.receive(&mut self.messages, several, deadline);
        self.messages.pop_front().ok_or_else(|| {
            self.stuck = true;
            DataError::Timeout { batch: self.due(), timeout: self.options.timeout.unwrap_or_default() }
        })
    }

    /// How many batches the training loop waits for where it has to wait, of those that are on their way.
    fn several(&self) -> usize {
        let coming = (self.in_flight / 2).min(self.outstanding.saturating_sub(self.ready()));
        let in_burst = BURST.as_nanos() * self.wanted as u128 / self.common.at_work.time_of_a_batch().as_nanos().max(1);
        usize::try_from(in_burst).unwrap_or(coming).min(coming).max(1)
    }

    /// The number of the batch that the training loop waits for, for errors.
    fn due(&self) -> usize {
        if self.options.in_order { self.arrived.due() } else { self.first_undelivered }
    }

    /// Makes room for another batch, once the memory of the one before that which was received is free.
    pub(crate) fn taken(&mut self, made: &Made<B>) {
        self.outstanding -= 1;
        if let Some(budget) = &self.common.budget {
            budget.taken(made);
        }
        self.grant();
    }

    /// Whether no worker makes a batch, nor will before more are granted.
    pub(crate) fn are_resting(&self) -> bool {
        self.outstanding == self.ready() || self.common.at_work.have_ended()
    }

    fn grant(&mut self) {
        // Once all batches ahead are made, workers rest until one is left: it is trained on while they make the next. Of
        // two, none is left, for they would never rest.
        let left = usize::from(self.in_flight > 2);
        if self.options.compute_threads.is_some() && self.are_resting() && self.outstanding > left {
            return;
        }
        // With `in_order(false)`, batches may overtake a slow one. The limit keeps the list of delivered numbers short,
        // which is part of the saved state.
        let end = self.first_undelivered + MOST_AHEAD.max(self.in_flight);
        while self.outstanding < self.in_flight && self.granted_to < end && self.permits.is_some() {
            self.send(Permit::Make);
            self.outstanding += 1;
            self.granted_to += 1;
        }
    }

    /// Wakes as many of the threads as there is something to read ahead for: they were permitted no batch.
    pub(crate) fn read_ahead(&self) {
        if self.common.granted.is_empty() {
            (0..self.common.work.parts_ahead().min(self.wanted)).for_each(|_| self.send(Permit::ReadAhead));
        }
    }

    fn send(&self, permit: Permit) {
        if let Some(permits) = &self.permits {
            // `self` holds a receiver, so the channel is never closed.
            _ = permits.send(permit);
        }
    }
}

/// Reports that a thread has ended, however it ends: otherwise the training loop could wait for it forever.
struct EndReport<'a, B> {
    mailbox: &'a Mailbox<Message<B>>,
    done: bool,
    error: Option<DataError>,
}

impl<B> Drop for EndReport<'_, B> {
    fn drop(&mut self) {
        self.mailbox.send(Message::Ended { done: self.done, error: self.error.take() }, true);
    }
}

impl<B> Drop for Workers<B> {
    /// Stops every thread after the sample that it is reading, and joins it. A thread that does not stop in time is in
    /// the user's code, perhaps forever: it is detached.
    fn drop(&mut self) {
        self.common.cancelled.cancel();
        self.permits = None;
        if let Some(budget) = &self.common.budget {
            budget.wake();
        }
        // A thread that waits for a permit wakes up: the sender dropped above was the last one.
        let patience = if self.stuck { Duration::ZERO } else { GRACE };
        let deadline = Instant::now() + patience;
        loop {
            let ended = self.messages.drain(..).filter(|message| matches!(message, Message::Ended { .. })).count();
            self.alive -= ended;
            if self.alive == 0 || !self.common.mailbox.receive(&mut self.messages, 1, Some(deadline)) {
                break;
            }
        }
        for thread in self.threads.drain(..).filter(|thread| self.alive == 0 || thread.is_finished()) {
            // Panics in user code have been caught and reported; only dropping a batch can still have panicked.
            _ = thread.join();
        }
        if self.alive > 0 {
            self.common.mailbox.close();
            let detached = self.alive;
            tracing::warn!(detached, ?patience, "workers of a dropped epoch did not stop, and were left running");
            self.options.counters.detached(detached);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Condvar, Mutex};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(120);
    const READERS: usize = 3;

    /// Parts that threads read ahead, each once all others are being read.
    #[derive(Default)]
    struct Parts {
        state: Mutex<State>,
        changed: Condvar,
    }

    #[derive(Default)]
    struct State {
        parts: usize,
        /// How many times a thread found nothing to read.
        idle: usize,
        begun: usize,
    }

    impl Parts {
        fn wait_while(&self, condition: impl Fn(&State) -> bool) -> bool {
            let state = self.state.lock().unwrap();
            !self.changed.wait_timeout_while(state, PATIENCE, |state| condition(state)).unwrap().1.timed_out()
        }
    }

    impl EpochWork<()> for Parts {
        fn make(&self, _cancelled: &Cancellation) -> Option<Made<()>> {
            None
        }

        fn read_ahead(&self, _cancelled: &Cancellation) -> bool {
            let mut state = self.state.lock().unwrap();
            self.changed.notify_all();
            if state.parts == 0 {
                state.idle += 1;
                return false;
            }
            (state.parts, state.begun) = (state.parts - 1, state.begun + 1);
            drop(state);
            self.wait_while(|state| state.begun < READERS)
        }

        fn parts_ahead(&self) -> usize {
            self.state.lock().unwrap().parts
        }
    }

    #[test]
    fn as_many_sleeping_threads_wake_as_there_are_parts_to_read_ahead() -> Result<(), DataError> {
        let options = WorkerOptions {
            in_order: true,
            timeout: None,
            init: None,
            nice: 0,
            compute_threads: None,
            readers: READERS,
            counters: Arc::default(),
        };
        let parts = Arc::new(Parts::default());
        let readers = Workers::spawn(parts.clone(), READERS, 0, 0, options, None)?;
        // Each looks once, and then sleeps until it is woken.
        assert!(parts.wait_while(|state| state.idle < READERS));
        parts.state.lock().unwrap().parts = READERS;
        readers.read_ahead();
        assert!(parts.wait_while(|state| state.begun < READERS), "not all were woken");
        Ok(())
    }
}
