//! Records a run while a step timer times it.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tch::Device;

use super::stepped::{NextStep, SteppedProfiler};
use super::{Claim, MachineInfo, ProfiledSteps, RunProfile};
use crate::{GpuSource, Monitor, ProfileError, TraceWriter};

/// The last 10 minutes at the default interval: enough for shares of time, and a file that a page can hold.
const LONGEST_WINDOW: usize = 6000;

/// What is recorded of a run, for [`StepTimerBuilder::record`](crate::StepTimerBuilder::record): the steps, the machine, and a
/// few steps under the profiler.
#[must_use = "a recorder does nothing until a step timer takes it"]
pub struct RunRecorder {
    folder: Option<PathBuf>,
    steps_before: u64,
    /// None for as many as are enough.
    profiled_steps: Option<u64>,
    sample_interval: Duration,
    gpus: Option<Box<dyn GpuSource>>,
    claim: Option<Claim>,
    note: Option<&'static str>,
}

impl Default for RunRecorder {
    fn default() -> Self {
        Self::new()
    }
}

impl RunRecorder {
    /// A recorder that profiles 5 steps or more after 20 that it only times, besides those of the timer's warm-up, and looks at
    /// the machine 10 times a second.
    pub fn new() -> Self {
        Self {
            folder: None,
            steps_before: 20,
            profiled_steps: None,
            sample_interval: Duration::from_millis(100),
            gpus: None,
            claim: None,
            note: None,
        }
    }

    /// Writes `profile.json` and `trace.json.gz` there, when the profiler is done and again at the end; a rank of several
    /// adds its number to the names. Without a folder, nothing is written.
    pub fn folder(mut self, folder: impl AsRef<Path>) -> Self {
        self.folder = Some(folder.as_ref().to_owned());
        self
    }

    /// How many steps are timed between the warm-up and the profiler [default: 20].
    pub fn steps_before(mut self, steps: u64) -> Self {
        self.steps_before = steps;
        self
    }

    /// How many steps are profiled [default: 5, more where they take less than 50 ms together, and 100 at most]; 0 for none. One
    /// more goes before them to warm the profiler up. None of them counts among the timed ones, nor do steps while the trace is
    /// written beside them.
    pub fn profiled_steps(mut self, steps: u64) -> Self {
        self.profiled_steps = Some(steps);
        self
    }

    /// The time between two looks at the machine [default: 0.1 s].
    pub fn sample_interval(mut self, interval: Duration) -> Self {
        self.sample_interval = interval;
        self
    }

    /// Another source of GPUs than NVML.
    pub fn gpus(mut self, source: impl GpuSource + 'static) -> Self {
        self.gpus = Some(Box::new(source));
        self
    }

    /// Records what `overdrive-profile run` asks for: `OVERDRIVE_PROFILE` is the folder, `OVERDRIVE_PROFILE_BEFORE` and
    /// `OVERDRIVE_PROFILE_STEPS` are counts of steps. They win over what the program says.
    ///
    /// # Errors
    /// `Setting` for a count that is none.
    pub(crate) fn claimed(mut self, claim: Claim) -> Result<Self, ProfileError> {
        self.folder = Some(claim.folder());
        self.steps_before = Claim::steps("OVERDRIVE_PROFILE_BEFORE")?.unwrap_or(self.steps_before);
        self.profiled_steps = Claim::steps("OVERDRIVE_PROFILE_STEPS")?.or(self.profiled_steps);
        self.claim = Some(claim);
        Ok(self)
    }

    /// Whether it records for `overdrive-profile run` already.
    pub(crate) fn is_claimed(&self) -> bool {
        self.claim.is_some()
    }

    /// Something that the reader of the record should know.
    #[cfg(feature = "record")]
    pub(crate) fn note(mut self, note: &'static str) -> Self {
        self.note = Some(note);
        self
    }

    /// Recording begins.
    pub(crate) fn start(self, device: Device, warmup_steps: u64, now: Duration) -> Result<Recorder, ProfileError> {
        let mut monitor = Monitor::builder().interval(self.sample_interval).window(LONGEST_WINDOW).threads(true);
        if let Some(source) = self.gpus {
            monitor = monitor.gpus(source);
        }
        let mut run = RunProfile::new();
        run.command = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
        run.unix_seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        run.machine = MachineInfo::of(device);
        run.timer_thread = rustix::thread::gettid().as_raw_pid();
        run.notes.extend(self.note.map(str::to_owned));
        (run.rank, run.world_size) = rank_of_environment();
        if let Some(folder) = &self.folder {
            std::fs::create_dir_all(folder).map_err(|error| ProfileError::Io {
                path: folder.clone(),
                action: "make the folder",
                error,
            })?;
        }
        let skipped = warmup_steps.saturating_add(self.steps_before);
        let profiler = match self.profiled_steps {
            Some(0) => None,
            steps => Some(SteppedProfiler::start(steps, skipped)?),
        };
        Ok(Recorder {
            run,
            folder: self.folder,
            claim: self.claim,
            device,
            retries_before: alloc_retries(device),
            began: now,
            monitor: monitor.start()?,
            profiler,
            trace: None,
            is_writing: false,
        })
    }
}

/// A recording that is under way.
pub(crate) struct Recorder {
    run: RunProfile,
    folder: Option<PathBuf>,
    /// None for a recorder that the program itself has asked for.
    claim: Option<Claim>,
    device: Device,
    retries_before: Option<u64>,
    /// By the timer's clock.
    began: Duration,
    monitor: Monitor,
    /// While there is something to profile.
    profiler: Option<SteppedProfiler>,
    trace: Option<TraceWriter>,
    /// It was being written when the step began.
    is_writing: bool,
}

impl Recorder {
    /// When the recording began, by the timer's clock.
    pub(crate) fn began(&self) -> Duration {
        self.began
    }

    /// The next step begins. `fill` adds what the timer knows, should a file be written.
    pub(crate) fn step_ended(&mut self, fill: impl FnOnce(&mut RunProfile)) -> NextStep {
        let Some(profiler) = &mut self.profiler else { return self.step_behind_profile() };
        let next = profiler.step().unwrap_or_else(|error| {
            self.run.notes.push(format!("the profiler: {error}"));
            NextStep::Timed
        });
        if !profiler.is_over() {
            return next;
        }
        self.take_profile();
        self.write_so_far(fill);
        self.is_writing = self.trace.is_some();
        if self.is_writing { NextStep::Profiled } else { NextStep::Timed }
    }

    /// Steps beside the thread that writes the trace are slowed down as well.
    fn step_behind_profile(&mut self) -> NextStep {
        let is_still = self.trace.as_ref().is_some_and(|trace| !trace.is_finished());
        let is_done = self.is_writing && !is_still;
        self.is_writing &= is_still;
        if is_done { NextStep::Timed } else { NextStep::AsAlways }
    }

    /// The last step has ended. `fill` adds what the timer knows, as above.
    pub(crate) fn finish(mut self, fill: impl FnOnce(&mut RunProfile)) -> Result<RunProfile, ProfileError> {
        self.take_profile();
        self.monitor.stop();
        self.look(fill);
        if let Some(trace) = self.trace.take()
            && let Err(error) = trace.wait()
        {
            self.run.notes.push(format!("the trace: {error}"));
        }
        self.run.notes.extend(self.claim.as_ref().and_then(Claim::others));
        self.write()?;
        Ok(self.run)
    }

    /// Ends without a record, and removes what was written of it.
    #[cfg(feature = "record")]
    pub(crate) fn discard(mut self) {
        if let Some(trace) = self.trace.take() {
            // One that could not be written need not be removed.
            let _ = trace.wait();
        }
        for path in [self.path("profile", "json"), self.path("trace", "json.gz")].into_iter().flatten() {
            // There is none before the profiler is done.
            let _ = std::fs::remove_file(path);
        }
    }

    /// Writes what there is so far, for the case that the program does not get to its end.
    fn write_so_far(&mut self, fill: impl FnOnce(&mut RunProfile)) {
        if self.folder.is_some() {
            self.look(fill);
            if let Err(error) = self.write() {
                self.run.notes.push(error.to_string());
            }
        }
    }

    fn look(&mut self, fill: impl FnOnce(&mut RunProfile)) {
        fill(&mut self.run);
        let retries = alloc_retries(self.device).zip(self.retries_before);
        self.run.alloc_retries = retries.map(|(now, before)| now.saturating_sub(before));
        self.run.samples = self.monitor.samples().iter().map(|sample| (**sample).clone()).collect();
        self.run.gaps = self.monitor.gaps();
    }

    fn write(&self) -> Result<(), ProfileError> {
        match self.path("profile", "json") {
            Some(path) => self.run.write_json(path),
            None => Ok(()),
        }
    }

    /// What the profiler has recorded, which ends it.
    fn take_profile(&mut self) {
        let Some(profiler) = self.profiler.take() else { return };
        let outcome = profiler.finish();
        self.run.notes.extend(outcome.notes);
        let Some(profile) = outcome.profile else { return };
        match ProfiledSteps::of(&profile, outcome.whole_steps) {
            Ok(Some(steps)) => {
                let queued_seconds = outcome.queued_seconds.map(|seconds| seconds / steps.steps as f64);
                self.run.profiled = Some(ProfiledSteps { queued_seconds, ..steps });
            }
            Ok(None) => {}
            Err(error) => self.run.notes.push(format!("the profile: {error}")),
        }
        if let Some(path) = self.path("trace", "json.gz") {
            match profile.export_chrome_trace_in_background(path) {
                Ok(writer) => self.trace = Some(writer),
                Err(error) => self.run.notes.push(format!("the trace: {error}")),
            }
        }
    }

    fn path(&self, name: &str, extension: &str) -> Option<PathBuf> {
        let rank = if self.run.world_size > 1 { format!(".rank{}", self.run.rank) } else { String::new() };
        let label = self.claim.as_ref().map(|claim| format!(".{}", claim.label())).unwrap_or_default();
        Some(self.folder.as_ref()?.join(format!("{name}{rank}{label}.{extension}")))
    }
}

impl std::fmt::Debug for RunRecorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunRecorder")
            .field("folder", &self.folder)
            .field("steps_before", &self.steps_before)
            .field("profiled_steps", &self.profiled_steps)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recorder").field("folder", &self.folder).finish_non_exhaustive()
    }
}

/// None without a GPU.
fn alloc_retries(device: Device) -> Option<u64> {
    let Device::Cuda(index) = device else { return None };
    u64::try_from(overdrive_ffi::cuda::memory_stats(index).ok()?.alloc_retries).ok()
}

/// As launchers tell it: `RANK` and `WORLD_SIZE`.
fn rank_of_environment() -> (u64, u64) {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    match (number("RANK"), number("WORLD_SIZE")) {
        (Some(rank), Some(size)) if rank < size => (rank, size),
        _ => (0, 1),
    }
}
