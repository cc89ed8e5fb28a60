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

use crossbeam::channel::{Receiver, Sender, TryRecvError, unbounded};

use crate::loader::budget::Budget;
use crate::loader::guard::survived;
use crate::loader::mailbox::Mailbox;
use crate::loader::reorder::Reorder;
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

/// Messages to workers.
enum Permit {
    Make,
    /// There may be room to read ahead.
    ReadAhead,
    /// The worker that receives this ends.
    End,
}

/// Messages from workers.
enum Message<B> {
    Made(Made<B>),
    /// A worker has ended; `done` when no batch was left to make.
    Ended {
        done: bool,
        error: Option<DataError>,
    },
}

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
    work: Arc<dyn EpochWork<B>>,
    options: WorkerOptions,
    budget: Option<Arc<Budget<B>>>,
    /// `None` once no batch is left to make.
    permits: Option<Sender<Permit>>,
    granted: Receiver<Permit>,
    mailbox: Arc<Mailbox<Message<B>>>,
    /// Those that were taken out of it.
    messages: VecDeque<Message<B>>,
    /// With `in_order`, batches that wait for their turn.
    arrived: Reorder<Made<B>>,
    /// The number of the first batch that was not delivered to the training loop.
    first_undelivered: usize,
    /// The number of the next batch to be permitted.
    granted_to: usize,
    /// How many finished batches are in messages.
    unreceived: Arc<AtomicUsize>,
    at_work: Arc<AtWork>,
    /// How many batches may be permitted and not yet taken.
    in_flight: usize,
    /// How many are permitted and not yet taken.
    outstanding: usize,
    /// Threads that have not reported their end; `wanted` excludes those that were told to end.
    alive: usize,
    wanted: usize,
    started: usize,
    cancelled: Cancellation,
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
        budget: Option<Arc<Budget<B>>>,
    ) -> Result<Self, DataError> {
        let (permits, granted) = unbounded();
        let mut workers = Self {
            work,
            options,
            budget,
            permits: Some(permits),
            granted,
            mailbox: Arc::new(Mailbox::new()),
            messages: VecDeque::new(),
            arrived: Reorder::starting_at(first),
            first_undelivered: first,
            granted_to: first,
            unreceived: Arc::default(),
            at_work: Arc::default(),
            in_flight: 0,
            outstanding: 0,
            alive: 0,
            wanted: 0,
            started: 0,
            cancelled: Cancellation::new(),
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
            self.work.shared_by(count);
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
        self.unreceived.load(Ordering::Relaxed) + self.arrived.waiting()
    }

    fn start_thread(&self, worker: usize) -> io::Result<JoinHandle<()>> {
        let (work, granted, mailbox) = (self.work.clone(), self.granted.clone(), self.mailbox.clone());
        let (cancelled, options, unreceived) = (self.cancelled.clone(), self.options.clone(), self.unreceived.clone());
        let (budget, at_work) = (self.budget.clone(), self.at_work.clone());
        Builder::new().name(format!("dataload-{worker}")).spawn(move || {
            let mut end_report = EndReport { mailbox: &mailbox, done: false, error: None };
            let send = |batch| {
                unreceived.fetch_add(1, Ordering::Relaxed);
                mailbox.send(Message::Made(batch), false);
            };
            let served = begin(worker, options.nice, options.init.as_ref());
            match served.and_then(|()| serve(&*work, &granted, send, budget.as_deref(), &at_work, &cancelled)) {
                Ok(done) => end_report.done = done,
                Err(error) => end_report.error = Some(error),
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
                    self.unreceived.fetch_sub(1, Ordering::Relaxed);
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
        self.mailbox.receive(&mut self.messages, several, deadline);
        self.messages.pop_front().ok_or_else(|| {
            self.stuck = true;
            DataError::Timeout { batch: self.due(), timeout: self.options.timeout.unwrap_or_default() }
        })
    }

    /// How many batches the training loop waits for where it has to wait, of those that are on their way.
    fn several(&self) -> usize {
        let coming = (self.in_flight / 2).min(self.outstanding.saturating_sub(self.ready()));
        let in_burst = BURST.as_nanos() * self.wanted as u128 / self.at_work.time_of_a_batch().as_nanos().max(1);
        usize::try_from(in_burst).unwrap_or(coming).min(coming).max(1)
    }

    /// The number of the batch that the training loop waits for, for errors.
    fn due(&self) -> usize {
        if self.options.in_order { self.arrived.due() } else { self.first_undelivered }
    }

    /// Makes room for another batch, once the memory of the one before that which was received is free.
    pub(crate) fn taken(&mut self, made: &Made<B>) {
        self.outstanding -= 1;
        if let Some(budget) = &self.budget {
            budget.taken(made);
        }
        self.grant();
    }

    /// Whether no worker makes a batch, nor will before more are granted.
    pub(crate) fn are_resting(&self) -> bool {
        self.outstanding == self.ready() || self.at_work.have_ended()
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

    /// Wakes one of the threads where there is something to read ahead: they were permitted no batch.
    pub(crate) fn read_ahead(&self) {
        if self.granted.is_empty() && self.work.can_read_ahead() {
            self.send(Permit::ReadAhead);
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

/// Makes a batch, and turns a panic into an error: some of the user's code, such as `Dataset::key`, runs outside of
/// [`guarded`](super::guard::guarded).
pub(crate) fn make_guarded<B>(work: &dyn EpochWork<B>, cancelled: &Cancellation) -> Result<Option<Made<B>>, DataError> {
    survived(|| work.make(cancelled)).map_err(died)
}

fn died(message: String) -> DataError {
    DataError::WorkerDied { message }
}

/// Makes batches until none are left (`true`), or until the thread is told to stop (`false`); reads ahead where it has
/// no permit.
fn serve<B>(
    work: &dyn EpochWork<B>,
    granted: &Receiver<Permit>,
    send: impl Fn(Made<B>),
    budget: Option<&Budget<B>>,
    at_work: &AtWork,
    cancelled: &Cancellation,
) -> Result<bool, DataError> {
    loop {
        if cancelled.is_cancelled() {
            return Ok(false);
        }
        let permit = match granted.try_recv() {
            Err(TryRecvError::Empty) if survived(|| work.read_ahead(cancelled)).map_err(died)? => continue,
            Err(TryRecvError::Empty) => granted.recv().ok(),
            permit => permit.ok(),
        };
        match permit {
            None => return Ok(true),
            Some(Permit::End) => return Ok(false),
            Some(Permit::ReadAhead) => {}
            Some(Permit::Make) => {
                let making = budget.map(|budget| budget.begin(cancelled));
                if let Some(None) = making {
                    return Ok(false);
                }
                let (_making, begun) = (at_work.begin(), Instant::now());
                let Some(mut made) = make_guarded(work, cancelled)? else {
                    at_work.no_batch_is_left();
                    return Ok(true);
                };
                if let Some(making) = making.flatten() {
                    making.done(&mut made);
                }
                at_work.took(begun.elapsed());
                send(made);
            }
        }
    }
}

impl<B> Drop for Workers<B> {
    /// Stops every thread after the sample that it is reading, and joins it. A thread that does not stop in time is in
    /// the user's code, perhaps forever: it is detached.
    fn drop(&mut self) {
        self.cancelled.cancel();
        self.permits = None;
        if let Some(budget) = &self.budget {
            budget.wake();
        }
        // A thread that waits for a permit wakes up: the sender dropped above was the last one.
        let patience = if self.stuck { Duration::ZERO } else { GRACE };
        let deadline = Instant::now() + patience;
        loop {
            let ended = self.messages.drain(..).filter(|message| matches!(message, Message::Ended { .. })).count();
            self.alive -= ended;
            if self.alive == 0 || !self.mailbox.receive(&mut self.messages, 1, Some(deadline)) {
                break;
            }
        }
        for thread in self.threads.drain(..).filter(|thread| self.alive == 0 || thread.is_finished()) {
            // Panics in user code have been caught and reported; only dropping a batch can still have panicked.
            _ = thread.join();
        }
        if self.alive > 0 {
            let detached = self.alive;
            tracing::warn!(detached, ?patience, "workers of a dropped epoch did not stop, and were left running");
            self.options.counters.detached(detached);
        }
    }
}
