//! A rank's communicator: how it begins, what was issued to it, and how it ends.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::call::Place;
use super::code::{self, Code, Failure};
use super::journal;
use super::lanes::Lanes;
use super::members::{self, Exchange};
use super::order;
use super::reduce::{DataType, Reduction};
use super::registered::Registered;

/// How long a host that waits for other ranks sleeps before it looks again.
const PAUSE: Duration = Duration::from_micros(500);
/// How often it looks whether the peers' processes are alive.
const LIVENESS: Duration = Duration::from_millis(20);

/// What is in progress besides collectives. Meanwhile the state is `ncclInProgress`.
pub enum Step {
    /// The ranks of a split tell each other which new communicator each goes to.
    Exchange(Exchange),
    /// It waits for the other ranks to come.
    Gathering,
    /// It finishes what was issued, and then accepts no more calls.
    Finalizing,
    Done,
}

/// What a communicator counts.
#[derive(Default)]
pub struct Counters {
    pub collectives: u64,
    /// For each other rank.
    pub sends: BTreeMap<usize, u64>,
    pub receives: BTreeMap<usize, u64>,
    pub splits: u64,
    /// For each split, what each rank has said of it: its color and key.
    pub members: BTreeMap<usize, Vec<(i32, i32)>>,
    /// By the list of the ranks that were left out.
    pub shrinks: BTreeMap<String, u64>,
    pub operators: BTreeMap<i32, (DataType, Reduction)>,
    pub is_finalized: bool,
}

/// This rank's place in the shared file.
pub struct Seat {
    pub lanes: Lanes,
    pub place: Place,
    pub path: PathBuf,
    device: usize,
}

impl Drop for Seat {
    fn drop(&mut self) {
        // Missing if a rank has not come; then the communicator cannot be used.
        let _ = std::fs::remove_file(&self.path);
        order::end(self.device, &self.path);
    }
}

pub struct Communicator {
    pub device: usize,
    pub blocks: bool,
    seat: OnceLock<Seat>,
    step: Mutex<Step>,
    /// The asynchronous error, `ncclInProgress` or success.
    state: AtomicI32,
    /// Why it has failed.
    reason: OnceLock<String>,
    is_aborted: AtomicBool,
    /// The counts of groups of calls: issued, done, and those that somebody waits for.
    issued: AtomicU64,
    ended: AtomicU64,
    wanted: AtomicU64,
    counters: Mutex<Counters>,
    looked: Mutex<Option<Instant>>,
    pub registered: Registered,
}

fn open<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Communicator {
    /// A new communicator, which has no seat until `poll` says so.
    pub fn new(device: usize, blocks: bool, step: Step) -> Self {
        Self {
            device,
            blocks,
            seat: OnceLock::new(),
            step: Mutex::new(step),
            state: AtomicI32::new(Code::IN_PROGRESS.0),
            reason: OnceLock::new(),
            is_aborted: AtomicBool::new(false),
            issued: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            wanted: AtomicU64::new(0),
            counters: Mutex::default(),
            looked: Mutex::default(),
            registered: Registered::default(),
        }
    }

    /// Takes the rank's seat.
    pub fn sit(&self, path: PathBuf, place: Place) -> Result<(), Failure> {
        let device = self.device;
        let lanes = Lanes::attach(&path, (place.rank, place.ranks), members::physical(device))?;
        order::begin(device, &path);
        // There is only one step, and it takes the seat once.
        let _ = self.seat.set(Seat { lanes, place, path, device });
        Ok(())
    }

    /// The seat, if the communicator can be used; otherwise the asynchronous error.
    pub fn ready(&self) -> Result<&Seat, Failure> {
        match self.poll() {
            Code::SUCCESS => self.seat.get().ok_or_else(|| Failure::new(Code::INTERNAL, "there is no seat")),
            Code::IN_PROGRESS => {
                let text = "Attempt to use communicator before the previous operation returned ncclSuccess";
                Err(Failure::new(Code::INVALID_ARGUMENT, text))
            }
            error => {
                let text = self.reason.get().map_or("", String::as_str);
                Err(Failure::new(error, format!("the communicator has failed: {text}")))
            }
        }
    }

    /// The seat, also of a communicator that has failed.
    pub fn seat(&self) -> Option<&Seat> {
        self.seat.get()
    }

    pub fn counters(&self) -> MutexGuard<'_, Counters> {
        open(&self.counters)
    }

    /// Makes progress with what is in progress, and returns the state.
    pub fn poll(&self) -> Code {
        let state = Code(self.state.load(Ordering::Acquire));
        if state == Code::IN_PROGRESS {
            let mut step = open(&self.step);
            match self.go_on(&mut step) {
                Ok(false) => {}
                Ok(true) => {
                    *step = Step::Done;
                    let (old, new) = (Code::IN_PROGRESS.0, Code::SUCCESS.0);
                    // An error that came in between stays.
                    let _ = self.state.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire);
                }
                Err(failure) => self.fail(&failure),
            }
        }
        if self.is_flushed()
            && let Some(failure) = self.broken()
        {
            self.fail(&failure);
        }
        Code(self.state.load(Ordering::Acquire))
    }

    fn go_on(&self, step: &mut Step) -> Result<bool, Failure> {
        if self.is_aborted.load(Ordering::Acquire) {
            return Err(Failure::new(Code::INTERNAL, "aborted"));
        }
        match step {
            Step::Exchange(exchange) => {
                let Some((path, place)) = exchange.go_on()? else { return Ok(false) };
                self.sit(path, place)?;
                *step = Step::Gathering;
                Ok(false)
            }
            Step::Gathering => match self.seat.get() {
                Some(seat) => members::have_come(seat, || self.may_look()),
                None => Err(Failure::new(Code::INTERNAL, "there is no seat")),
            },
            Step::Finalizing => Ok(self.is_flushed()),
            Step::Done => Ok(true),
        }
    }

    /// Waits until nothing but collectives is under way.
    pub fn wait(&self) -> Code {
        loop {
            match self.poll() {
                Code::IN_PROGRESS => sleep(PAUSE),
                state => return state,
            }
        }
    }

    /// Begins to finish what was issued. `poll` says when that is done.
    pub fn flush(&self) {
        self.want(self.issued.load(Ordering::Acquire));
        let mut step = open(&self.step);
        let (old, new) = (Code::SUCCESS.0, Code::IN_PROGRESS.0);
        if self.state.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            *step = Step::Finalizing;
        }
    }

    fn is_flushed(&self) -> bool {
        self.ended.load(Ordering::Acquire) >= self.issued.load(Ordering::Acquire)
    }

    /// Numbers a group of calls.
    pub fn issue(&self) -> u64 {
        self.issued.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Whether everything before a group is done. The groups of a communicator run one after the other also in
    /// different streams, because they share its buffers: NCCL makes them wait for each other on a stream of its own
    /// (`ncclLaunchPrepare`).
    pub fn is_turn_of(&self, number: u64) -> bool {
        self.ended.load(Ordering::Acquire) + 1 >= number
    }

    /// Notes that somebody waits for the groups up to this one.
    pub fn want(&self, number: u64) {
        self.wanted.fetch_max(number, Ordering::AcqRel);
    }

    pub fn wants(&self, number: u64) -> bool {
        self.wanted.load(Ordering::Acquire) >= number
    }

    pub fn end(&self, number: u64) {
        self.ended.fetch_max(number, Ordering::AcqRel);
    }

    /// Aborts what is in progress, also in other threads.
    pub fn abort(&self) {
        self.is_aborted.store(true, Ordering::Release);
    }

    /// Whether no collective can run any more, because this rank has failed or aborted.
    pub fn is_over(&self) -> bool {
        let state = Code(self.state.load(Ordering::Acquire));
        self.is_aborted.load(Ordering::Acquire) || ![Code::SUCCESS, Code::IN_PROGRESS].contains(&state)
    }

    /// Why another rank has ended the communicator. A collective for which all data are there is finished nevertheless,
    /// so that the results do not depend on which rank is faster.
    pub fn broken(&self) -> Option<Failure> {
        self.seat.get().filter(|_| !are_links_cut()).and_then(|seat| seat.lanes.broken())
    }

    /// Ends the communicator at all ranks.
    pub fn break_with(&self, failure: &Failure) {
        if let Some(seat) = self.seat.get().filter(|_| !are_links_cut()) {
            seat.lanes.break_with(failure);
        }
        self.fail(failure);
    }

    fn fail(&self, failure: &Failure) {
        // Another rank has ended it first, for another reason.
        let _ = self.reason.set(failure.text.clone());
        let fails = |state| [Code::SUCCESS.0, Code::IN_PROGRESS.0].contains(&state).then_some(failure.code.0);
        let is_first = self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, fails).is_ok();
        if is_first && !self.is_aborted.load(Ordering::Acquire) {
            let what = match failure.code {
                Code::INVALID_USAGE => "mismatched collectives",
                Code::REMOTE => "nccl ranks that ended",
                _ => "nccl errors",
            };
            let rank = self.seat.get().map_or("a rank".to_owned(), |seat| format!("rank {}", seat.place.rank));
            code::tell(&failure.text);
            journal::leave(what, format!("nccl, {rank}: {}", failure.text));
        }
    }

    /// Whether it is time to look for the peers' processes.
    pub fn may_look(&self) -> bool {
        let (mut looked, now) = (open(&self.looked), Instant::now());
        let may = looked.is_none_or(|last| now.duration_since(last) >= LIVENESS);
        if may {
            *looked = Some(now);
        }
        may
    }
}

static LINKS_ARE_CUT: AtomicBool = AtomicBool::new(false);

/// From now on, nothing from this process arrives at other ranks, and nothing from them here.
pub fn cut_links() {
    LINKS_ARE_CUT.store(true, Ordering::Release);
}

pub fn are_links_cut() -> bool {
    LINKS_ARE_CUT.load(Ordering::Acquire)
}

static ALL: Mutex<BTreeMap<usize, Arc<Communicator>>> = Mutex::new(BTreeMap::new());

/// A handle for the caller.
pub fn add(communicator: &Arc<Communicator>) -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0x1000);
    let handle = NEXT.fetch_add(16, Ordering::Relaxed);
    open(&ALL).insert(handle, communicator.clone());
    handle
}

/// The communicator of a handle.
pub fn of(handle: usize) -> Result<Arc<Communicator>, Failure> {
    let own = open(&ALL).get(&handle).cloned();
    own.ok_or_else(|| Failure::new(Code::INVALID_ARGUMENT, format!("{handle:#x} is no communicator")))
}

/// Whether memory is registered at a communicator that is there.
pub fn is_registered(address: usize) -> bool {
    open(&ALL).values().any(|communicator| communicator.registered.has(address))
}

/// Gives a handle back.
pub fn remove(handle: usize) {
    open(&ALL).remove(&handle);
}
