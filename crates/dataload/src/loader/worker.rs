//! The threads of one epoch.
//!
//! Threads live as long as the epoch that they work for. So nothing is left to drain or to reset after a break, an
//! error or a panic, and an idle loader holds no thread; starting one takes some tens of microseconds.
//!
//! A thread makes a batch for every permit that it gets. At most `in_flight` permits are out whose batches the consumer
//! has not taken: that bounds memory, and no thread ever blocks on a full queue.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, unbounded};

use crate::loader::guard::message_of;
use crate::loader::reorder::Reorder;
use crate::loader::work::{EpochWork, Made};
use crate::{Cancellation, DataError};

/// The most batches that may be ahead, whatever was asked for.
pub(crate) const MOST_IN_FLIGHT: usize = 1 << 16;

/// How far, out of order, batches may be ahead of the first that is missing.
const MOST_AHEAD: usize = 1024;

/// A function that each worker calls with its number before its first batch.
pub(crate) type WorkerInit = Arc<dyn Fn(usize) -> Result<(), DataError> + Send + Sync>;

/// What workers are told.
enum Permit {
    Make,
    /// Whoever gets this leaves.
    Leave,
}

/// What workers tell.
enum Message<B> {
    Made(Made<B>),
    /// A worker has left; `done` when there was nothing left to make.
    Left {
        done: bool,
        error: Option<DataError>,
    },
}

/// How the threads of an epoch behave.
#[derive(Clone)]
pub(crate) struct Conduct {
    pub(crate) in_order: bool,
    pub(crate) timeout: Option<Duration>,
    pub(crate) init: Option<WorkerInit>,
    /// How much the workers stand back for the training thread, see `setpriority(2)`.
    pub(crate) nice: i32,
}

pub(crate) struct Workers<B> {
    work: Arc<dyn EpochWork<B>>,
    conduct: Conduct,
    /// None once there is nothing left to make.
    permits: Option<Sender<Permit>>,
    granted: Receiver<Permit>,
    told: Sender<Message<B>>,
    messages: Receiver<Message<B>>,
    /// In order, what waits for its turn.
    arrived: Reorder<Made<B>>,
    /// The first batch that the consumer has not had.
    missing: usize,
    /// How many batches were begun, counted from the epoch's start.
    granted_to: usize,
    /// Batches that have been made and not been received.
    made: Arc<AtomicUsize>,
    /// Batches that may be under way or waiting.
    in_flight: usize,
    /// Batches that are.
    outstanding: usize,
    /// Threads that have not said that they left, and those of them that were not told to leave.
    alive: usize,
    wanted: usize,
    started: usize,
    cancelled: Cancellation,
    threads: Vec<JoinHandle<()>>,
    /// Whether a thread may be stuck in the user's code, so that joining it could take for ever.
    stuck: bool,
}

impl<B: Send + 'static> Workers<B> {
    /// Starts `count` threads, which begin with the first `in_flight` batches at once; `first` is the number of the
    /// first batch.
    pub(crate) fn spawn(
        work: Arc<dyn EpochWork<B>>,
        count: usize,
        in_flight: usize,
        first: usize,
        conduct: Conduct,
    ) -> Result<Self, DataError> {
        let ((permits, granted), (told, messages)) = (unbounded(), unbounded());
        let mut workers = Self {
            work,
            conduct,
            permits: Some(permits),
            granted,
            told,
            messages,
            arrived: Reorder::starting_at(first),
            missing: first,
            granted_to: first,
            made: Arc::default(),
            in_flight: 0,
            outstanding: 0,
            alive: 0,
            wanted: 0,
            started: 0,
            cancelled: Cancellation::new(),
            threads: Vec::with_capacity(count),
            stuck: false,
        };
        // When a thread cannot be started, dropping `workers` joins those before it.
        workers.resize(count, in_flight)?;
        Ok(workers)
    }

    /// Changes the number of threads and of batches ahead while the epoch runs.
    pub(crate) fn resize(&mut self, count: usize, in_flight: usize) -> Result<(), DataError> {
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
            self.send(Permit::Leave);
            self.wanted -= 1;
        }
        self.in_flight = in_flight.min(MOST_IN_FLIGHT);
        self.grant();
        Ok(())
    }

    /// Batches that lie ready.
    pub(crate) fn ready(&self) -> usize {
        self.made.load(Ordering::Relaxed) + self.arrived.waiting()
    }

    fn start_thread(&self, worker: usize) -> io::Result<JoinHandle<()>> {
        let (work, granted, told) = (self.work.clone(), self.granted.clone(), self.told.clone());
        let (cancelled, conduct, made) = (self.cancelled.clone(), self.conduct.clone(), self.made.clone());
        Builder::new().name(format!("dataload-{worker}")).spawn(move || {
            let mut farewell = Farewell { told, done: false, error: None };
            stand_back(conduct.nice);
            stay_single();
            let tell = |batch| {
                made.fetch_add(1, Ordering::Relaxed);
                farewell.told.send(Message::Made(batch)).is_ok()
            };
            let served = begin(worker, conduct.init.as_ref()).and_then(|()| serve(&*work, &granted, tell, &cancelled));
            match served {
                Ok(done) => farewell.done = done,
                Err(error) => farewell.error = Some(error),
            }
        })
    }

    /// Waits for the next batch; none at the end of the epoch. `missing` is the first one that the consumer has not had.
    pub(crate) fn receive(&mut self, missing: usize) -> Result<Option<Made<B>>, DataError> {
        let asked = Instant::now();
        self.missing = missing;
        self.grant();
        loop {
            if let Some(made) = self.arrived.take() {
                return Ok(Some(self.taken(made)));
            }
            if self.alive == 0 && self.messages.is_empty() {
                let unfinished = self.permits.is_some() || self.arrived.waiting() > 0;
                return if unfinished { Err(DataError::WorkersGone { batch: self.due() }) } else { Ok(None) };
            }
            match self.next_message(asked)? {
                Message::Made(made) => {
                    self.made.fetch_sub(1, Ordering::Relaxed);
                    match self.conduct.in_order {
                        true => self.arrived.put(made.number, made),
                        false => return Ok(Some(self.taken(made))),
                    }
                }
                Message::Left { done, error } => {
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
        // `self` holds a sender, so the channel is never closed.
        let gone = DataError::WorkersGone { batch: self.due() };
        match self.conduct.timeout {
            None => self.messages.recv().map_err(|_| gone),
            Some(timeout) => {
                self.messages.recv_timeout(timeout.saturating_sub(asked.elapsed())).map_err(|error| match error {
                    RecvTimeoutError::Disconnected => gone,
                    RecvTimeoutError::Timeout => {
                        self.stuck = true;
                        DataError::Timeout { batch: self.due(), timeout }
                    }
                })
            }
        }
    }

    /// The first batch that has not been received.
    fn due(&self) -> usize {
        if self.conduct.in_order { self.arrived.due() } else { self.missing }
    }

    fn taken(&mut self, made: Made<B>) -> Made<B> {
        self.outstanding -= 1;
        self.grant();
        made
    }

    fn grant(&mut self) {
        // Out of order, batches may run ahead of one that is stuck, but not for ever: each is remembered.
        let end = self.missing + MOST_AHEAD.max(self.in_flight);
        while self.outstanding < self.in_flight && self.granted_to < end && self.permits.is_some() {
            self.send(Permit::Make);
            self.outstanding += 1;
            self.granted_to += 1;
        }
    }

    fn send(&self, permit: Permit) {
        if let Some(permits) = &self.permits {
            // `self` holds a receiver, so the channel is never closed.
            _ = permits.send(permit);
        }
    }
}

/// Tells that a thread has left, however it leaves: otherwise the consumer could wait for it for ever.
struct Farewell<B> {
    told: Sender<Message<B>>,
    done: bool,
    error: Option<DataError>,
}

impl<B> Drop for Farewell<B> {
    fn drop(&mut self) {
        // Fails only when the epoch has been dropped.
        _ = self.told.send(Message::Left { done: self.done, error: self.error.take() });
    }
}

/// Makes a batch, and lets no panic out: of the user's code, some runs outside of the places that know their sample.
pub(crate) fn make_guarded<B>(work: &dyn EpochWork<B>, cancelled: &Cancellation) -> Result<Option<Made<B>>, DataError> {
    let made = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work.make(cancelled)));
    made.map_err(|payload| DataError::WorkerDied { message: message_of(payload) })
}

/// Makes batches until there are none left (true), or until told to stop.
fn serve<B>(
    work: &dyn EpochWork<B>,
    granted: &Receiver<Permit>,
    tell: impl Fn(Made<B>) -> bool,
    cancelled: &Cancellation,
) -> Result<bool, DataError> {
    for permit in granted {
        if cancelled.is_cancelled() {
            return Ok(false);
        }
        match permit {
            Permit::Leave => return Ok(false),
            Permit::Make => match make_guarded(work, cancelled)? {
                None => return Ok(true),
                Some(made) => {
                    if !tell(made) {
                        return Ok(false);
                    }
                }
            },
        }
    }
    Ok(true)
}

fn begin(worker: usize, init: Option<&WorkerInit>) -> Result<(), DataError> {
    let Some(init) = init else { return Ok(()) };
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| init(worker)));
    let failed = |error| DataError::WorkerInit { worker, error: Box::new(error) };
    match outcome {
        Ok(outcome) => outcome.map_err(failed),
        Err(payload) => Err(failed(DataError::other(format!("it panicked: {}", message_of(payload))))),
    }
}

/// Gives the calling thread a lower priority, where the system has one for each thread.
#[cfg(target_os = "linux")]
fn stand_back(nice: i32) {
    if nice != 0 {
        let thread = rustix::thread::gettid();
        // Fails where a sandbox forbids it: the loader then works as without.
        if let Err(error) = rustix::process::setpriority_process(Some(thread), nice) {
            tracing::debug!(%error, "the worker keeps its priority");
        }
    }
}

/// Keeps libtorch's operators in the calling thread, so that no worker starts a pool of its own.
fn stay_single() {
    if let Err(error) = overdrive_ffi::context::use_one_thread() {
        tracing::debug!(%error, "libtorch may use several threads in a worker");
    }
}

#[cfg(not(target_os = "linux"))]
fn stand_back(_nice: i32) {}

impl<B> Drop for Workers<B> {
    /// Stops every thread after the sample that it is reading, and joins it.
    fn drop(&mut self) {
        self.cancelled.cancel();
        self.permits = None;
        // A thread that waits for a permit wakes when the last sender is gone, which was the one above.
        for thread in self.threads.drain(..).filter(|_| !self.stuck) {
            // A panic in user code has been caught and delivered; what is left could only be one in dropping a batch.
            _ = thread.join();
        }
    }
}
