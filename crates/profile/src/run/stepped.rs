//! The profiler of a recording. libtorch has one in a process, and a program's own goes first.

use std::cell::RefCell;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::monitor::queued_seconds_of_this_thread;
use crate::{Profile, ProfileError, Profiler, ProfilerAction, Schedule};

/// Steps are profiled until there are so many, and so much time: in a few short ones, a thread that waited for a CPU once would be
/// most of what is seen.
const ENOUGH_STEPS: u64 = 5;
const ENOUGH_TIME: Duration = Duration::from_millis(50);
/// However short they are.
const MOST_STEPS: u64 = 100;
/// Steps that are left to the program's profiler before the next try; twice as many after each that failed.
const FIRST_PAUSE: u64 = 8;

type Slot = RefCell<Option<Profiler>>;

thread_local! {
    static ON_THIS_THREAD: RefCell<Weak<Slot>> = const { RefCell::new(Weak::new()) };
}

/// Turns the profiler of this thread's recording off, for a profiler that has found libtorch's taken. Whether it was on.
pub(crate) fn give_way() -> bool {
    let slot = ON_THIS_THREAD.with_borrow(Weak::upgrade);
    // One that is just being moved on is the one that asks.
    let taken = slot.and_then(|slot| slot.try_borrow_mut().ok()?.take_if(|profiler| profiler.has_session()));
    taken.is_some()
}

/// What the timer has to know of the step that begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NextStep {
    /// Like the one before.
    AsAlways,
    /// The profiler slows it down.
    Profiled,
    /// The profiler is off again, which has taken some time.
    Timed,
}

/// Profiles a few steps, some time after the first one.
pub(super) struct SteppedProfiler {
    /// None while the program's own profiler is on, and in the end.
    slot: Rc<Slot>,
    /// None for as many as are enough.
    steps: Option<u64>,
    /// When the first profiled step began.
    since: Option<Instant>,
    whole_steps: u64,
    /// The thread's time without a CPU, when the first profiled step began and when the last whole one ended.
    queued_seconds: Option<(f64, f64)>,
    /// How many steps the last pause takes.
    pause: u64,
    /// How many of them are left. None while there is no pause.
    paused: Option<u64>,
    is_over: bool,
}

/// What it leaves behind.
#[derive(Default)]
pub(super) struct Outcome {
    pub profile: Option<Arc<Profile>>,
    /// How many of its steps are whole.
    pub whole_steps: u64,
    /// How long the thread had no CPU in all of them. None where the kernel does not tell.
    pub queued_seconds: Option<f64>,
    pub notes: Vec<String>,
}

impl SteppedProfiler {
    pub fn start(steps: Option<u64>, skipped: u64) -> Result<Self, ProfileError> {
        let slot = Rc::default();
        let mut this = Self {
            slot,
            steps,
            since: None,
            whole_steps: 0,
            queued_seconds: None,
            pause: 0,
            paused: None,
            is_over: false,
        };
        this.try_on(skipped)?;
        ON_THIS_THREAD.set(Rc::downgrade(&this.slot));
        Ok(this)
    }

    /// Or pauses.
    fn try_on(&mut self, skipped: u64) -> Result<(), ProfileError> {
        let schedule = Schedule::new(0, 1, self.steps.unwrap_or(MOST_STEPS))?.repeat(1).skip_first(skipped);
        let profiler = Profiler::builder().schedule(schedule).profile_memory(true).with_flops(true).start();
        match profiler {
            Ok(profiler) => {
                self.slot.replace(Some(profiler));
                (self.since, self.whole_steps, self.queued_seconds, self.paused) = (None, 0, None, None);
            }
            Err(ProfileError::Busy) => self.pause(),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn pause(&mut self) {
        self.slot.take();
        self.pause = FIRST_PAUSE.max(2 * self.pause);
        self.paused = Some(self.pause);
    }

    /// Whether nothing more is to come.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// The next step begins.
    ///
    /// # Errors
    /// When libtorch's profiler fails: it is over then.
    pub fn step(&mut self) -> Result<NextStep, ProfileError> {
        let stepped = if self.slot.borrow().is_some() { self.step_on() } else { self.step_off() };
        self.is_over |= stepped.is_err();
        stepped
    }

    fn step_on(&mut self) -> Result<NextStep, ProfileError> {
        let mut slot = self.slot.borrow_mut();
        let Some(profiler) = &mut *slot else { return Ok(NextStep::AsAlways) };
        if profiler.is_recording() {
            self.whole_steps += 1;
            let now = queued_seconds_of_this_thread().ok();
            self.queued_seconds = self.queued_seconds.zip(now).map(|((since, _), now)| (since, now));
        }
        let time = self.since.map_or(Duration::ZERO, |since| since.elapsed());
        if self.steps.is_none() && self.whole_steps >= ENOUGH_STEPS && time >= ENOUGH_TIME {
            self.is_over = true;
            return profiler.stop().map(|()| NextStep::Timed);
        }
        let before = profiler.action();
        let stepped = profiler.step();
        let after = profiler.action();
        if profiler.is_recording() && self.since.is_none() {
            self.since = Some(Instant::now());
            self.queued_seconds = queued_seconds_of_this_thread().ok().map(|now| (now, now));
        }
        drop(slot);
        match (stepped, before, after) {
            (Err(ProfileError::Busy), ..) => {
                self.pause();
                Ok(NextStep::AsAlways)
            }
            (Err(error), ..) => Err(error),
            (Ok(()), ProfilerAction::RecordAndSave, _) => {
                self.is_over = true;
                Ok(NextStep::Timed)
            }
            (Ok(()), ProfilerAction::None, ProfilerAction::None) => Ok(NextStep::AsAlways),
            (Ok(()), ..) => Ok(NextStep::Profiled),
        }
    }

    fn step_off(&mut self) -> Result<NextStep, ProfileError> {
        match &mut self.paused {
            // The program's own profiler has taken it away in this step.
            None => {
                self.pause();
                return Ok(NextStep::Timed);
            }
            Some(0) => self.try_on(0)?,
            Some(left) => *left -= 1,
        }
        Ok(if self.paused.is_none() { NextStep::Profiled } else { NextStep::AsAlways })
    }

    /// Ends it, in the middle of a step as well.
    pub fn finish(self) -> Outcome {
        let queued_seconds = self.queued_seconds.map(|(since, until)| until - since);
        let mut outcome = Outcome { whole_steps: self.whole_steps, queued_seconds, ..Outcome::default() };
        let Some(mut profiler) = self.slot.take() else {
            // What else ended it has been told.
            let own = "no step was profiled: the program has a profiler of its own, which was on";
            outcome.notes.extend((!self.is_over).then(|| own.to_owned()));
            return outcome;
        };
        if profiler.is_on()
            && let Err(error) = profiler.stop()
        {
            outcome.notes.push(format!("the profiler: {error}"));
        }
        for gap in profiler.gaps() {
            let jump = gap.clock_jump_ns as f64 / 1e9;
            outcome.notes.push(format!("the profiled steps were left out: the system's clock jumped by {jump:.3} s"));
        }
        outcome.profile = profiler.profile().cloned();
        outcome
    }
}
