//! Threads that read the samples of an epoch before its workers need them.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};
use std::vec;

use crate::loader::guard::survived;
use crate::loader::lock;
use crate::loader::stats::Counters;
use crate::loader::thread::begin;
use crate::loader::work::Lookup;
use crate::sample_bytes::SampleBytes;
use crate::{Cancellation, DataError, Dataset};

/// How long the end of an epoch waits for a sample that is being read.
const GRACE: Duration = Duration::from_secs(5);
/// A worker that waits for a sample of a reader's looks so often whether the epoch was dropped: the reader may never
/// come back.
const LOOK_UP: Duration = Duration::from_millis(50);

/// The options of an epoch's readers.
#[derive(Clone)]
pub(crate) struct ReaderOptions {
    pub(crate) count: usize,
    /// As of workers.
    pub(crate) nice: i32,
    pub(crate) counters: Arc<Counters>,
    /// The bytes of the samples that they may hold.
    pub(crate) most_bytes: usize,
}

/// The samples of a dataset. The worker that needs one takes it from the readers, or reads it where they have not begun
/// it.
pub(crate) struct Readers<D: Dataset> {
    dataset: Arc<D>,
    shared: Arc<Shared<D::Sample>>,
    threads: Vec<JoinHandle<()>>,
    counters: Arc<Counters>,
    measure: Option<SampleBytes<D::Sample>>,
}

struct Shared<S> {
    state: Mutex<State<S>>,
    /// Notified when a sample was read or taken, and at the end.
    changed: Condvar,
}

struct State<S> {
    /// The indices that are left to read, in the epoch's order.
    order: vec::IntoIter<usize>,
    /// How often workers have read these before a reader came to them.
    passed: HashMap<usize, usize>,
    /// How often these are under way though their batches were made without them: what comes is dropped.
    unneeded: HashMap<usize, usize>,
    /// What readers have begun and nobody has taken, by index.
    begun: HashMap<usize, VecDeque<Begun<S>>>,
    /// How many samples `begun` has, and how many it may have.
    held: usize,
    most: usize,
    /// The bytes of those that were read, how many they may be, and those of the largest so far.
    bytes: usize,
    most_bytes: usize,
    largest: usize,
    /// How many are being read.
    reading: usize,
    is_over: bool,
}

enum Begun<S> {
    UnderWay,
    /// A sample with its bytes.
    Read(Result<S, DataError>, usize),
    Panicked(String),
}

impl<D: Dataset + 'static> Readers<D> {
    /// Starts the threads, which read at most `most` samples ahead, in this order, and fewer where their bytes are known
    /// and too many.
    pub(crate) fn start(
        dataset: Arc<D>,
        options: &ReaderOptions,
        measure: Option<SampleBytes<D::Sample>>,
        most: usize,
        mut order: Vec<usize>,
    ) -> Result<Self, DataError> {
        // An index beyond the end is an error of the worker that asks for it.
        order.retain(|index| *index < dataset.len());
        let state = State {
            order: order.into_iter(),
            passed: HashMap::new(),
            unneeded: HashMap::new(),
            begun: HashMap::new(),
            held: 0,
            most,
            bytes: 0,
            most_bytes: options.most_bytes,
            largest: 0,
            reading: 0,
            is_over: false,
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let &ReaderOptions { count, nice, ref counters, .. } = options;
        let (threads, counters) = (Vec::with_capacity(count), counters.clone());
        let mut readers = Self { dataset, shared, threads, counters, measure };
        for reader in 0..count {
            let (dataset, shared) = (readers.dataset.clone(), readers.shared.clone());
            let measure = readers.measure.clone();
            let thread = Builder::new().name(format!("dataload-reader-{reader}")).spawn(move || {
                // Only the user's function can fail, which is for workers.
                _ = begin(reader, nice, None);
                shared.read(&*dataset, measure.as_deref());
            });
            // Dropping `readers` ends those that run.
            readers.threads.push(thread.map_err(|error| DataError::Spawn { worker: reader, of: count, error })?);
        }
        Ok(readers)
    }
}

impl<S> Shared<S> {
    /// Reads samples until there are no more.
    fn read(&self, dataset: &impl Dataset<Sample = S>, measure: Option<&(dyn Fn(&S) -> usize + Send + Sync)>) {
        while let Some(index) = self.begin() {
            let sample = || {
                let sample = dataset.get(index);
                let bytes = sample.as_ref().ok().zip(measure).map_or(0, |(sample, measure)| measure(sample));
                Begun::Read(sample, bytes)
            };
            let read = survived(sample).unwrap_or_else(Begun::Panicked);
            let mut state = lock(&self.state);
            state.reading -= 1;
            state.put(index, read);
            drop(state);
            self.changed.notify_all();
        }
    }

    /// Waits for room, and takes the next index; `None` at the end.
    fn begin(&self) -> Option<usize> {
        let mut state = lock(&self.state);
        loop {
            if state.is_over {
                return None;
            }
            if state.has_room() {
                let index = state.next()?;
                state.held += 1;
                state.reading += 1;
                state.begun.entry(index).or_default().push_back(Begun::UnderWay);
                return Some(index);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// What the readers have of this index, once it is there; `None` where they have not begun it, and then need not.
    fn take(&self, index: usize, cancelled: &Cancellation) -> Result<Option<Begun<S>>, DataError> {
        let mut state = lock(&self.state);
        loop {
            // Where an index is drawn several times, another worker may have taken what this one waited for.
            if !state.is_under_way(index) {
                let read = state.pop(index);
                drop(state);
                self.changed.notify_all();
                return Ok(read);
            }
            cancelled.check()?;
            state = self.changed.wait_timeout(state, LOOK_UP).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Drops what the readers have of this index, now or once it is there, without waiting for it.
    fn pass_over(&self, index: usize) {
        let mut state = lock(&self.state);
        match state.is_under_way(index) {
            true => *state.unneeded.entry(index).or_default() += 1,
            false => drop(state.pop(index)),
        }
        drop(state);
        self.changed.notify_all();
    }
}

impl<S> State<S> {
    /// Whether one more may be read. One always may, and until the first was read, each reader reads one.
    fn has_room(&self) -> bool {
        let to_come = self.largest.saturating_mul(self.reading + 1);
        self.held < self.most && (self.held == 0 || self.bytes.saturating_add(to_come) <= self.most_bytes)
    }

    /// Whether all that the readers have begun of this index is still being read.
    fn is_under_way(&self, index: usize) -> bool {
        // What was read comes before what is not.
        self.begun.get(&index).is_some_and(|begun| matches!(begun.front(), Some(Begun::UnderWay)))
    }

    /// Takes what was begun first of this index. Where nothing was, no reader needs to read it any more.
    fn pop(&mut self, index: usize) -> Option<Begun<S>> {
        let Some(begun) = self.begun.get_mut(&index) else {
            *self.passed.entry(index).or_default() += 1;
            return None;
        };
        let first = begun.pop_front();
        if begun.is_empty() {
            self.begun.remove(&index);
        }
        self.held -= 1;
        if let Some(Begun::Read(_, bytes)) = first {
            self.bytes -= bytes;
        }
        first
    }

    /// Puts a sample in its place. Where an index was begun several times, each is the same sample.
    fn put(&mut self, index: usize, read: Begun<S>) {
        if let Some(times) = self.unneeded.get_mut(&index).filter(|times| **times > 0) {
            *times -= 1;
            self.pop(index);
            return;
        }
        let mut begun = self.begun.get_mut(&index).into_iter().flatten();
        if let Some(place) = begun.find(|begun| matches!(begun, Begun::UnderWay)) {
            if let Begun::Read(_, bytes) = read {
                self.bytes += bytes;
                self.largest = self.largest.max(bytes);
            }
            *place = read;
        }
    }

    /// The next index that no worker has read.
    fn next(&mut self) -> Option<usize> {
        loop {
            let index = self.order.next()?;
            match self.passed.get_mut(&index) {
                Some(times) if *times > 0 => *times -= 1,
                _ => return Some(index),
            }
        }
    }
}

impl<D: Dataset + 'static> Lookup for Readers<D> {
    type Sample = D::Sample;

    fn len(&self) -> usize {
        self.dataset.len()
    }

    fn get(&self, index: usize, is_substitute: bool, cancelled: &Cancellation) -> Result<D::Sample, DataError> {
        let read = match self.threads.is_empty() || is_substitute {
            true => None,
            false => self.shared.take(index, cancelled)?,
        };
        match read {
            Some(Begun::Read(read, _)) => read,
            // Panics in the worker, as if it had read the sample itself.
            Some(Begun::Panicked(message)) => std::panic::panic_any(message),
            Some(Begun::UnderWay) | None => self.dataset.get(index),
        }
    }

    fn bytes(&self, sample: &D::Sample) -> usize {
        self.measure.as_ref().map_or(0, |measure| measure(sample))
    }

    fn pass_over(&self, index: usize) {
        if !self.threads.is_empty() {
            self.shared.pass_over(index);
        }
    }

    fn key(&self, index: usize) -> Option<String> {
        self.dataset.key(index)
    }
}

impl<D: Dataset> Drop for Readers<D> {
    /// Ends the threads after the samples that they are reading. One that does not end in time is in the user's code.
    fn drop(&mut self) {
        let mut state = lock(&self.shared.state);
        state.is_over = true;
        self.shared.changed.notify_all();
        let deadline = Instant::now() + GRACE;
        while state.reading > 0
            && let Some(left) = deadline.checked_duration_since(Instant::now())
        {
            state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let detached = state.reading;
        drop(state);
        if detached > 0 {
            tracing::warn!(detached, "readers of a dropped epoch did not stop, and were left running");
            self.counters.detached(detached);
            return;
        }
        self.threads.drain(..).for_each(|thread| _ = thread.join());
    }
}
