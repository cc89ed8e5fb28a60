//! The profiler of a recording. libtorch supports one profiler per process, and the program's own takes precedence.

use std::cell::RefCell;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use crate::monitor::queued_seconds_of_this_thread;
use crate::{Profile, ProfileError, Profiler, ProfilerAction, Schedule};

/// Profiling continues until both are reached: in a few short steps, a single wait for a CPU would be most of the time.
const ENOUGH_STEPS: u64 = 5;
const ENOUGH_TIME: Duration = Duration::from_millis(50);
/// The limit for very short steps.
const MOST_STEPS: u64 = 100;
/// Steps before the next try when the program's own profiler is on; doubled after each failed try.
const FIRST_PAUSE: u64 = 8;

type Slot = RefCell<Option<Profiler>>;

thread_local! {
    static ON_THIS_THREAD: RefCell<Weak<Slot>> = const { RefCell::new(Weak::new()) };
}

/// Turns off the profiler of this thread's recording, so that the program's own can start. Returns whether it was on.
pub(crate) fn release_profiler() -> bool {
    let slot = ON_THIS_THREAD.with_borrow(Weak::upgrade);
    // Borrowed means that the recording's own profiler called us.
    let taken = slot.and_then(|slot| slot.try_borrow_mut().ok()?.take_if(|profiler| profiler.has_session()));
    taken.is_some()
}

/// What the timer has to know about the step that begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NextStep {
    /// Like the step before.
    Unchanged,
    /// The profiler slows it down.
    Profiled,
    /// The profiler has been turned off, which took time that no step should include.
    Timed,
}

/// Profiles a few steps in the course of a recording.
pub(super) struct SteppedProfiler {
    /// None while the program's own profiler is on, and at the end.
    slot: Rc<Slot>,
    /// None: as many as are needed.
    steps: Option<u64>,
    /// When the first profiled step began, by the timer's clock.
    since: Option<Duration>,
    whole_steps: u64,
    /// The time that the thread had waited for a CPU when the first profiled step began, and when the last whole one
    /// ended.
    queued_seconds: Option<(f64, f64)>,
    /// The length of the last pause, in steps.
    pause: u64,
    /// How many steps of the pause are left. None while there is no pause.
    paused: Option<u64>,
    is_over: bool,
}

/// The result of profiling.
#[derive(Default)]
pub(super) struct Outcome {
    pub profile: Option<Arc<Profile>>,
    /// How many of its steps are whole.
    pub whole_steps: u64,
    /// How long the thread waited for a CPU in all of them. None if the kernel does not report it.
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
        this.try_start(skipped)?;
        ON_THIS_THREAD.set(Rc::downgrade(&this.slot));
        Ok(this)
    }

    /// Starts the profiler, or pauses if another one is on.
    fn try_start(&mut self, skipped: u64) -> Result<(), ProfileError> {
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

    /// Whether all profiled steps are done, or the profiler has failed.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// A step has ended and the next one begins. `clock` is the timer's.
    ///
    /// # Errors
    /// When libtorch's profiler fails: it is over then.
    pub fn step(&mut self, clock: &dyn Fn() -> Duration) -> Result<NextStep, ProfileError> {
        let stepped = if self.slot.borrow().is_some() { self.step_profiler(clock) } else { self.step_pause() };
        self.is_over |= stepped.is_err();
        stepped
    }

    fn step_profiler(&mut self, clock: &dyn Fn() -> Duration) -> Result<NextStep, ProfileError> {
        let mut slot = self.slot.borrow_mut();
        let Some(profiler) = &mut *slot else { return Ok(NextStep::Unchanged) };
        if profiler.is_recording() {
            self.whole_steps += 1;
            let queued = queued_seconds_of_this_thread().ok();
            self.queued_seconds = self.queued_seconds.zip(queued).map(|((since, _), until)| (since, until));
        }
        let time = self.since.map_or(Duration::ZERO, |since| clock().saturating_sub(since));
        if self.steps.is_none() && self.whole_steps >= ENOUGH_STEPS && time >= ENOUGH_TIME {
            self.is_over = true;
            return profiler.stop().map(|()| NextStep::Timed);
        }
        let before = profiler.action();
        let stepped = profiler.step();
        let after = profiler.action();
        if profiler.is_recording() && self.since.is_none() {
            self.since = Some(clock());
            self.queued_seconds = queued_seconds_of_this_thread().ok().map(|queued| (queued, queued));
        }
        drop(slot);
        match (stepped, before, after) {
            (Err(ProfileError::Busy), ..) => {
                self.pause();
                Ok(NextStep::Unchanged)
            }
            (Err(error), ..) => Err(error),
            (Ok(()), ProfilerAction::RecordAndSave, _) => {
                self.is_over = true;
                Ok(NextStep::Timed)
            }
            (Ok(()), ProfilerAction::None, ProfilerAction::None) => Ok(NextStep::Unchanged),
            (Ok(()), ..) => Ok(NextStep::Profiled),
        }
    }

    fn step_pause(&mut self) -> Result<NextStep, ProfileError> {
        match &mut self.paused {
            // The program's own profiler has replaced ours in this step.
            None => {
                self.pause();
                return Ok(NextStep::Timed);
            }
            Some(0) => self.try_start(0)?,
            Some(left) => *left -= 1,
        }
        Ok(if self.paused.is_none() { NextStep::Profiled } else { NextStep::Unchanged })
    }

    /// Ends the profiler, even in the middle of a step.
    pub fn finish(self) -> Outcome {
        let queued_seconds = self.queued_seconds.map(|(since, until)| until - since);
        let mut outcome = Outcome { whole_steps: self.whole_steps, queued_seconds, ..Outcome::default() };
        let Some(mut profiler) = self.slot.take() else {
            // Other reasons have been noted already.
            let own = "no step was profiled: the program's own `Profiler` was on";
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
            outcome.notes.push(format!("the profiled steps were discarded: the system's clock jumped by {jump:.3} s"));
        }
        outcome.profile = profiler.profile().cloned();
        outcome
    }
}
