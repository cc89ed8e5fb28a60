//! The profiler, and its state from step to step.

use std::sync::Arc;

use overdrive_ffi::profiler::{Options, Recorded, ScopeGuard, Session, record_function};

use super::builder::ProfilerBuilder;
use super::handler::TraceHandler;
use super::schedule::ProfilerAction;
use crate::events::Recording;
use crate::{Profile, ProfileError};

/// What a profiler was built with.
pub(super) struct Setup {
    pub options: Options,
    pub recording: Recording,
    pub acc_events: bool,
    pub schedule: Option<Box<dyn Fn(u64) -> ProfilerAction>>,
    pub handler: Option<Box<dyn TraceHandler>>,
    pub metadata: Vec<(String, String)>,
}

/// A window that was discarded because its times would have been wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gap {
    /// Its first step.
    pub first_step: u64,
    /// Its last step.
    pub last_step: u64,
    /// How far the system's clock jumped, in nanoseconds.
    pub clock_jump_ns: i64,
}

/// libtorch's profiler: operators, scopes, memory and the work of the GPU, in the steps that a schedule chooses.
///
/// It records operators of the thread that starts it and of the backward pass, and scopes ([`record_function`]) of
/// every thread. Operators of other threads are not recorded: libtorch has no safe way to stop recording a thread that
/// is inside one. Only one profiler can be on in a process. Dropping it, even in a panic, turns it off without a
/// profile.
///
/// ```
/// use overdrive_profile::{Profiler, Schedule, SortBy, TableOptions};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), overdrive_profile::ProfileError> {
/// let mut profiler = Profiler::builder()
///     .schedule(Schedule::new(1, 1, 2)?.repeat(1))
///     .record_shapes(true)
///     .on_trace_ready(|profile: std::sync::Arc<overdrive_profile::Profile>| {
///         println!("{}", profile.table(&TableOptions::sorted_by(SortBy::SelfCpuTimeTotal).row_limit(10))?);
///         Ok(())
///     })
///     .start()?;
/// let x = Tensor::randn([64, 64], (Kind::Float, Device::Cpu));
/// for _ in 0..4 {
///     let _ = x.matmul(&x);
///     profiler.step()?;
/// }
/// profiler.stop()?;
/// let profile = profiler.profile().expect("two steps were recorded");
/// assert_eq!(profile.key_averages(false)?.get("aten::matmul").map(|sum| sum.count), Some(2));
/// # Ok(())
/// # }
/// ```
///
/// # Source
/// `torch.profiler.profile`
#[doc(alias = "profile")]
pub struct Profiler {
    setup: Setup,
    is_on: bool,
    step: u64,
    window_began: u64,
    step_scope: Option<ScopeGuard>,
    session: Option<Session>,
    profile: Option<Arc<Profile>>,
    gaps: Vec<Gap>,
}

impl Profiler {
    /// Options of a profiler.
    pub fn builder() -> ProfilerBuilder {
        ProfilerBuilder::new()
    }

    pub(super) fn new(setup: Setup) -> Self {
        Self {
            setup,
            is_on: false,
            step: 0,
            window_began: 0,
            step_scope: None,
            session: None,
            profile: None,
            gaps: Vec::new(),
        }
    }

    /// Turns the profiler on; the schedule decides what it does in the first step.
    ///
    /// # Errors
    /// When it is on already, or another profiler of this process is.
    pub fn start(&mut self) -> Result<(), ProfileError> {
        if self.is_on {
            return Err(ProfileError::AlreadyStarted);
        }
        self.enter(self.action())?;
        self.is_on = true;
        self.open_step();
        Ok(())
    }

    /// Ends a step and begins the next.
    ///
    /// # Errors
    /// When the profiler is not on, libtorch fails, or the handler does. The step counts in any case.
    ///
    /// # Syncs
    /// Waits for the GPU at the end of a window, if its work is recorded.
    pub fn step(&mut self) -> Result<(), ProfileError> {
        if !self.is_on {
            return Err(ProfileError::NotStarted);
        }
        self.step_scope = None;
        let before = self.action();
        self.step += 1;
        let moved = self.transit(before, self.action());
        self.open_step();
        moved
    }

    /// Turns the profiler off. An open window ends here, and its profile goes to the handler.
    ///
    /// # Errors
    /// When the profiler is not on, libtorch fails, or the handler does. The profiler is off in any case.
    ///
    /// # Syncs
    /// Waits for the GPU if its work is recorded, and for what the handler does in the background.
    pub fn stop(&mut self) -> Result<(), ProfileError> {
        if !self.is_on {
            return Err(ProfileError::NotStarted);
        }
        self.is_on = false;
        self.step_scope = None;
        let ready = match self.action() {
            ProfilerAction::Record | ProfilerAction::RecordAndSave => self.end_window(true),
            ProfilerAction::None | ProfilerAction::Warmup => Ok(()),
        };
        // A session that was only prepared.
        self.session = None;
        let finished = self.setup.handler.as_mut().map_or(Ok(()), |handler| handler.finish());
        ready.and(finished)
    }

    /// Whether the profiler is on.
    pub fn is_on(&self) -> bool {
        self.is_on
    }

    /// Whether the current step is recorded.
    pub fn is_recording(&self) -> bool {
        self.session.is_some() && matches!(self.action(), ProfilerAction::Record | ProfilerAction::RecordAndSave)
    }

    /// Whether it holds libtorch's profiler.
    pub(crate) fn has_session(&self) -> bool {
        self.session.is_some()
    }

    /// The current step; steps count from 0.
    #[doc(alias = "step_num")]
    pub fn current_step(&self) -> u64 {
        self.step
    }

    /// The profile of the last window.
    pub fn profile(&self) -> Option<&Arc<Profile>> {
        self.profile.as_ref()
    }

    /// The windows that were discarded.
    pub fn gaps(&self) -> &[Gap] {
        &self.gaps
    }

    /// Adds a top-level key to the trace that is being recorded; `json` is its value, as JSON.
    ///
    /// # Errors
    /// When nothing is being recorded, when the value is not JSON or has a backslash, when the key has a quote, a
    /// backslash or a control character (kineto does not escape them), or when kineto writes the key itself.
    ///
    /// # Source
    /// `torch.profiler.profile.add_metadata_json`
    #[doc(alias = "add_metadata")]
    pub fn add_metadata_json(&self, key: &str, json: &str) -> Result<(), ProfileError> {
        match &self.session {
            Some(session) if self.is_recording() => {
                check_metadata(key, json)?;
                Ok(session.add_metadata(key, json)?)
            }
            _ => Err(ProfileError::NotStarted),
        }
    }

    pub(crate) fn action(&self) -> ProfilerAction {
        self.setup.schedule.as_ref().map_or(ProfilerAction::Record, |schedule| schedule(self.step))
    }

    fn open_step(&mut self) {
        if self.setup.schedule.is_some() && self.session.is_some() {
            self.step_scope = Some(record_function(&format!("ProfilerStep#{}", self.step)));
        }
    }

    /// Moves from one step's action to the next one's. A handler's error is returned after the next window has begun.
    fn transit(&mut self, before: ProfilerAction, now: ProfilerAction) -> Result<(), ProfileError> {
        use ProfilerAction::{None, Record, RecordAndSave, Warmup};
        let ended = match (before, now) {
            (RecordAndSave, _) => self.end_window(true),
            (Record, None | Warmup) => {
                tracing::warn!(step = self.step, "the schedule ends a window without saving it");
                self.end_window(false)
            }
            (Warmup, None) => {
                tracing::warn!(step = self.step, "the schedule warms up and records nothing");
                self.session = Option::None;
                Ok(())
            }
            _ => Ok(()),
        };
        self.enter(now).and(ended)
    }

    /// Prepares or starts the session that an action needs. After a failure there is no session.
    fn enter(&mut self, action: ProfilerAction) -> Result<(), ProfileError> {
        let entered = if action == ProfilerAction::None { Ok(()) } else { self.advance(action) };
        if entered.is_err() {
            self.session = None;
        }
        entered
    }

    fn advance(&mut self, action: ProfilerAction) -> Result<(), ProfileError> {
        let mut is_new = false;
        if self.session.is_none() {
            let mut session = Session::prepare(self.setup.options)?;
            if session.is_none() && crate::run::release_profiler() {
                session = Session::prepare(self.setup.options)?;
            }
            self.session = Some(session.ok_or(ProfileError::Busy)?);
            is_new = true;
        }
        let Some(session) = self.session.as_mut() else { return Ok(()) };
        if action == ProfilerAction::Warmup || !is_new && session.is_recording() {
            return Ok(());
        }
        session.start()?;
        self.window_began = self.step;
        self.setup.metadata.iter().try_for_each(|(key, json)| session.add_metadata(key, json))?;
        Ok(())
    }

    /// Ends the window after the previous step, or, when the profiler stops, in the middle of the current step.
    fn end_window(&mut self, save: bool) -> Result<(), ProfileError> {
        let Some(session) = self.session.take() else { return Ok(()) };
        if self.setup.options.cuda {
            tch::Cuda::synchronize(-1);
        }
        let recorded = session.stop()?;
        let last_step = if self.is_on { self.step - 1 } else { self.step };
        let gap = Gap { first_step: self.window_began, last_step, clock_jump_ns: recorded.clock_jump_ns };
        if has_jumped(&recorded) {
            tracing::warn!(?gap, "the system's clock jumped while the profiler recorded: the window is discarded");
            self.gaps.push(gap);
            return Ok(());
        }
        let earlier = self.profile.take().filter(|_| self.setup.acc_events);
        let profile = Profile::new(recorded, gap.first_step..=last_step, self.setup.recording, earlier)?;
        let profile = Arc::new(profile);
        self.profile = Some(profile.clone());
        match &mut self.setup.handler {
            Some(handler) if save => handler.trace_ready(profile),
            _ => Ok(()),
        }
    }
}

/// Keys that kineto itself writes into a trace: the same key from the user would appear twice, or contradict it. The
/// last ones hold kineto's log messages.
const KEYS_OF_KINETO: [&str; 20] = [
    "schemaVersion",
    "deviceProperties",
    "displayTimeUnit",
    "baseTimeNanoseconds",
    "traceEvents",
    "traceName",
    "trace_id",
    "profile_memory",
    "record_shapes",
    "with_flops",
    "with_stack",
    "with_modules",
    "cupti_version",
    "cuda_runtime_version",
    "cuda_driver_version",
    "VERBOSE",
    "INFO",
    "WARNING",
    "STAGE",
    "ERROR",
];

/// kineto writes both unescaped, and turns backslashes into slashes.
pub(super) fn check_metadata(key: &str, json: &str) -> Result<(), ProfileError> {
    let wrong = |problem: String| ProfileError::Metadata { key: key.to_owned(), value: json.to_owned(), problem };
    if key.contains(|character: char| matches!(character, '"' | '\\') || character.is_control()) {
        return Err(wrong("the key has a character that kineto does not escape".to_owned()));
    }
    if KEYS_OF_KINETO.contains(&key) {
        return Err(wrong("kineto writes this key itself: take another one".to_owned()));
    }
    if json.contains('\\') {
        return Err(wrong("kineto cannot write a backslash".to_owned()));
    }
    serde_json::from_str::<serde_json::Value>(json).map(drop).map_err(|error| wrong(format!("not JSON: {error}")))
}

/// libtorch measures with the CPU's time-stamp counter, and calibrates it with the system's clock at both ends of a
/// window. If that clock is set in between, all times of the window are wrong. Slewing, at most 0.05%, is not a jump.
fn has_jumped(recorded: &Recorded) -> bool {
    jumped(recorded.clock_jump_ns, recorded.length_ns)
}

fn jumped(jump_ns: i64, length_ns: i64) -> bool {
    const ALWAYS_ALLOWED_NS: u64 = 10_000_000;
    jump_ns.unsigned_abs() > ALWAYS_ALLOWED_NS + length_ns.unsigned_abs() / 1000
}

impl std::fmt::Debug for Profiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Profiler").field("is_on", &self.is_on).field("step", &self.step).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::jumped;

    #[test]
    fn slewing_the_clock_is_not_a_jump() {
        let (ms, s) = (1_000_000, 1_000_000_000);
        assert!(!jumped(0, s));
        assert!(!jumped(-9 * ms, s));
        assert!(jumped(3600 * s, s));
        assert!(jumped(-3600 * s, s));
        assert!(!jumped(500 * ms, 1000 * s)); // 0.05%
        assert!(jumped(5 * s, 1000 * s));
    }
}
