//! Which steps are recorded, as a pure function of the step.

use crate::ProfileError;

/// What the profiler does in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProfilerAction {
    /// Nothing.
    None,
    /// It is prepared, which takes time that no recorded step should include.
    Warmup,
    /// It records.
    Record,
    /// It records, and the window ends with the step.
    RecordAndSave,
}

/// Cycles of waiting, warming up and recording.
///
/// ```
/// use overdrive_profile::{ProfilerAction, Schedule};
///
/// # fn main() -> Result<(), overdrive_profile::ProfileError> {
/// let schedule = Schedule::new(1, 1, 2)?.repeat(1).skip_first(10);
/// assert_eq!(schedule.action(10), ProfilerAction::None); // waits
/// assert_eq!(schedule.action(11), ProfilerAction::Warmup);
/// assert_eq!(schedule.action(12), ProfilerAction::Record);
/// assert_eq!(schedule.action(13), ProfilerAction::RecordAndSave);
/// assert_eq!(schedule.action(14), ProfilerAction::None); // no second cycle
/// # Ok(())
/// # }
/// ```
///
/// # Source
/// `torch.profiler.schedule`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(alias = "schedule")]
pub struct Schedule {
    wait: u64,
    warmup: u64,
    active: u64,
    repeat: u64,
    skip_first: u64,
    skip_first_wait: bool,
}

impl Schedule {
    /// Cycles of `wait` steps without recording, `warmup` steps of preparation and `active` recorded steps, repeated
    /// until the profiler stops.
    ///
    /// # Errors
    /// When no step is recorded, or a cycle has more steps than can be counted.
    pub fn new(wait: u64, warmup: u64, active: u64) -> Result<Self, ProfileError> {
        if active == 0 {
            return Err(ProfileError::Schedule("active = 0: a cycle must record one step at least".to_owned()));
        }
        if wait.checked_add(warmup).and_then(|steps| steps.checked_add(active)).is_none() {
            return Err(ProfileError::Schedule(format!(
                "wait = {wait}, warmup = {warmup}, active = {active}: a cycle must have fewer than 2^64 steps"
            )));
        }
        Ok(Self { wait, warmup, active, repeat: 0, skip_first: 0, skip_first_wait: false })
    }

    /// Ends after this many cycles; with 0, the default, cycles never end.
    pub fn repeat(mut self, cycles: u64) -> Self {
        self.repeat = cycles;
        self
    }

    /// Does nothing in this many steps before the first cycle.
    pub fn skip_first(mut self, steps: u64) -> Self {
        self.skip_first = steps;
        self
    }

    /// Whether the first cycle skips its `wait` steps.
    pub fn skip_first_wait(mut self, skip: bool) -> Self {
        self.skip_first_wait = skip;
        self
    }

    /// What the profiler does in a step; steps count from 0.
    pub fn action(&self, step: u64) -> ProfilerAction {
        let Some(step) = step.checked_sub(self.skip_first) else { return ProfilerAction::None };
        let step = u128::from(step) + if self.skip_first_wait { u128::from(self.wait) } else { 0 };
        let in_cycle = u128::from(self.wait + self.warmup + self.active);
        let (cycle, place) = (step / in_cycle, step % in_cycle);
        if self.repeat > 0 && cycle >= u128::from(self.repeat) || place < u128::from(self.wait) {
            ProfilerAction::None
        } else if place < u128::from(self.wait + self.warmup) {
            ProfilerAction::Warmup
        } else if place + 1 < in_cycle {
            ProfilerAction::Record
        } else {
            ProfilerAction::RecordAndSave
        }
    }
}
