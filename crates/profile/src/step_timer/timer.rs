//! The step timer.

use std::cell::RefCell;
use std::fmt;
use std::time::Duration;

use overdrive_ffi::profiler::{ScopeGuard, record_function};

use super::timeline::Timeline;
use super::{Batches, Phase, StepReport, StepTimerBuilder};
use crate::run::{NextStep, Recorder, SKIPPED};
use crate::{ProfileError, RunProfile};

/// Reports where the time of each training step goes: data, copies, the forward and backward passes, the optimizer,
/// other ranks.
///
/// Time counts in the phase that was entered last and is still open. So the time of a nested phase does not count in
/// the outer one, and the phases of a step add up to the step. Time without an open phase is [`Phase::Other`]. Each
/// phase is a scope in the profiler's traces.
///
/// It stays on the thread that it is made on.
///
/// With a CUDA device, the host only launches work, so events on the current stream measure what the device did in each
/// phase. The timer never waits for them: the report has the steps whose events the device has reached.
///
/// ```
/// use overdrive_profile::{Phase, StepTimer};
///
/// # fn main() -> Result<(), overdrive_profile::ProfileError> {
/// # let loader = vec![32; 20];
/// let timer = StepTimer::builder().warmup_steps(5).build()?;
/// for batch in timer.batches(loader) {
///     {
///         let _phase = timer.phase(Phase::Forward);
///         // ..
///     }
///     {
///         let _phase = timer.phase(Phase::Backward);
///         // ..
///     }
///     timer.step(batch);
/// }
/// let report = timer.report().expect("15 steps after the warm-up");
/// println!("{report}");
/// # assert_eq!(report.steps, 15);
/// # Ok(())
/// # }
/// ```
pub struct StepTimer {
    clock: Box<dyn Fn() -> Duration + Send>,
    timeline: RefCell<Timeline>,
    /// Steps per second at the device's peak rate, for the MFU.
    peak_steps_per_second: Option<f64>,
    recorder: RefCell<Option<Recorder>>,
}

impl StepTimer {
    /// Settings of a timer.
    pub fn builder() -> StepTimerBuilder {
        StepTimerBuilder::new()
    }

    pub(super) fn new(
        clock: Box<dyn Fn() -> Duration + Send>,
        timeline: Timeline,
        peak_steps_per_second: Option<f64>,
        recorder: Option<Recorder>,
    ) -> Self {
        Self { clock, timeline: RefCell::new(timeline), peak_steps_per_second, recorder: RefCell::new(recorder) }
    }

    /// Enters a phase, which lasts until the guard is dropped.
    ///
    /// # Syncs
    /// No.
    pub fn phase(&self, phase: Phase) -> PhaseGuard<'_> {
        PhaseGuard { timer: self, id: self.enter(phase), _scope: record_function(phase.name()) }
    }

    pub(super) fn enter(&self, phase: Phase) -> u64 {
        let now = (self.clock)();
        self.timeline.borrow_mut().enter(phase, now)
    }

    pub(super) fn leave(&self, id: u64) {
        let now = (self.clock)();
        self.timeline.borrow_mut().leave(id, now);
    }

    /// Passes the batches on, and counts the time that each `next` takes as [`Phase::DataWait`].
    pub fn batches<I: IntoIterator>(&self, batches: I) -> Batches<'_, I::IntoIter> {
        Batches::new(self, batches)
    }

    /// Ends a step, which has trained on this many samples. The next one begins at once, in the phases that are open.
    ///
    /// # Syncs
    /// No.
    pub fn step(&self, samples: u64) {
        let now = (self.clock)();
        self.timeline.borrow_mut().end_step(samples, now);
        let Some(recorder) = &mut *self.recorder.borrow_mut() else { return };
        let began = recorder.began();
        let next = recorder.step_ended(&*self.clock, |run| self.fill(run, began));
        if next != NextStep::Unchanged {
            let mut timeline = self.timeline.borrow_mut();
            timeline.is_profiled = next == NextStep::Profiled;
            timeline.resume((self.clock)());
        }
    }

    /// Ends the recording and returns the record. Dropping the timer also ends it, but only writes the files.
    ///
    /// # Errors
    /// `NothingToRecord` for a timer without a [recorder](StepTimerBuilder::record); `Io` when a file cannot be
    /// written.
    ///
    /// # Syncs
    /// Waits for the GPU if the profiler is still on, and for files.
    pub fn finish(self) -> Result<RunProfile, ProfileError> {
        let recorder = self.recorder.borrow_mut().take();
        let nothing = ProfileError::NothingToRecord("give the step timer a recorder: `.record(RunRecorder::new())`");
        self.finished(recorder.ok_or(nothing)?)
    }

    /// Ends the recording without a record.
    #[cfg(feature = "record")]
    pub(super) fn discard(self) {
        if let Some(recorder) = self.recorder.borrow_mut().take() {
            recorder.discard();
        }
    }

    fn finished(&self, recorder: Recorder) -> Result<RunProfile, ProfileError> {
        let began = recorder.began();
        recorder.finish(|run| self.fill(run, began))
    }

    /// Adds the steps to the record.
    fn fill(&self, run: &mut RunProfile, began: Duration) {
        run.steps = self.report();
        run.step_times = self.timeline.borrow().steps().iter().map(|step| step.times(began)).collect();
    }

    /// Adds tokens to the current step.
    pub fn count_tokens(&self, tokens: u64) {
        self.timeline.borrow_mut().count_tokens(tokens);
    }

    /// Discards the time since the last step, for example a validation. The next step begins with the next phase. A
    /// diagnosis leaves out what the machine and the workers did in that time as well.
    pub fn skip(&self) {
        self.timeline.borrow_mut().skip();
        drop(record_function(SKIPPED));
    }

    /// Where the time of the steps in the window went. None until the first step after the warm-up has ended.
    ///
    /// # Syncs
    /// No.
    pub fn report(&self) -> Option<StepReport> {
        let mut timeline = self.timeline.borrow_mut();
        timeline.resolve();
        StepReport::of(&timeline, self.peak_steps_per_second)
    }
}

impl Drop for StepTimer {
    fn drop(&mut self) {
        let recorder = self.recorder.borrow_mut().take();
        if let Some(Err(error)) = recorder.map(|recorder| self.finished(recorder)) {
            tracing::error!(%error, "the record of the run could not be written");
        }
    }
}

impl fmt::Debug for StepTimer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StepTimer").finish_non_exhaustive()
    }
}

/// A phase that is open until this is dropped. Made by [`StepTimer::phase`].
#[must_use = "the phase ends when the guard is dropped"]
#[derive(Debug)]
pub struct PhaseGuard<'timer> {
    timer: &'timer StepTimer,
    id: u64,
    _scope: ScopeGuard,
}

impl Drop for PhaseGuard<'_> {
    fn drop(&mut self) {
        self.timer.leave(self.id);
    }
}
