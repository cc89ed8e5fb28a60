//! Records a run while a step timer times it.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use overdrive_core::MemoryForecast;
use tch::Device;

use super::stepped::{NextStep, SteppedProfiler};
use super::{Claim, MachineInfo, ProfiledSteps, RunProfile};
use crate::{GpuSource, Monitor, ProfileError, TraceWriter};

/// 10 minutes at the default interval: enough for shares of time, and small enough for the page.
const LONGEST_WINDOW: usize = 6000;

/// What to record of a run, for [`StepTimerBuilder::record`](crate::StepTimerBuilder::record): the steps, the machine,
/// and a few steps under the profiler.
#[must_use = "a recorder does nothing until a step timer takes it"]
pub struct RunRecorder {
    folder: Option<PathBuf>,
    steps_before: u64,
    /// None: as many as are needed.
    profiled_steps: Option<u64>,
    sample_interval: Duration,
    gpus: Option<Box<dyn GpuSource>>,
    claim: Option<Claim>,
    note: Option<&'static str>,
    memory_forecast: Option<MemoryForecast>,
}

impl Default for RunRecorder {
    fn default() -> Self {
        Self::new()
    }
}

impl RunRecorder {
    /// A recorder that profiles 5 steps or more, after the timer's warm-up and 20 steps that it only times, and samples
    /// the machine 10 times per second.
    pub fn new() -> Self {
        Self {
            folder: None,
            steps_before: 20,
            profiled_steps: None,
            sample_interval: Duration::from_millis(100),
            gpus: None,
            claim: None,
            note: None,
            memory_forecast: None,
        }
    }

    /// Writes `profile.json` and `trace.json.gz` to this folder, when the profiler is done and again at the end. With
    /// several ranks, the names contain the rank. Without a folder, nothing is written.
    pub fn folder(mut self, folder: impl AsRef<Path>) -> Self {
        self.folder = Some(folder.as_ref().to_owned());
        self
    }

    /// How many steps are timed between the warm-up and the profiler [default: 20].
    pub fn steps_before(mut self, steps: u64) -> Self {
        self.steps_before = steps;
        self
    }

    /// How many steps are profiled [default: 5, or more if they take less than 50 ms together, but at most 100]; 0 for
    /// none. One more step before them warms the profiler up. These steps do not count as timed steps, nor do steps
    /// during which the trace is written.
    pub fn profiled_steps(mut self, steps: u64) -> Self {
        self.profiled_steps = Some(steps);
        self
    }

    /// The time between two samples of the machine [default: 0.1 s].
    pub fn sample_interval(mut self, interval: Duration) -> Self {
        self.sample_interval = interval;
        self
    }

    /// A source of GPU samples in place of NVML.
    pub fn gpus(mut self, source: impl GpuSource + 'static) -> Self {
        self.gpus = Some(Box::new(source));
        self
    }

    /// Adds what the steps' memory is used for, and what would make them fit, from `overdrive_memory::Estimate::forecast`:
    /// the page shows it, and the diagnosis says which technique fits.
    pub fn memory_forecast(mut self, forecast: MemoryForecast) -> Self {
        self.memory_forecast = Some(forecast);
        self
    }

    /// Applies the settings of `overdrive-profile run`: `OVERDRIVE_PROFILE` is the folder, `OVERDRIVE_PROFILE_BEFORE`
    /// and `OVERDRIVE_PROFILE_STEPS` are numbers of steps. They override the program's.
    ///
    /// # Errors
    /// `Setting` if a number of steps is not a number.
    pub(crate) fn claimed(mut self, claim: Claim) -> Result<Self, ProfileError> {
        self.folder = Some(claim.folder());
        self.steps_before = Claim::steps("OVERDRIVE_PROFILE_BEFORE")?.unwrap_or(self.steps_before);
        self.profiled_steps = Claim::steps("OVERDRIVE_PROFILE_STEPS")?.or(self.profiled_steps);
        self.claim = Some(claim);
        Ok(self)
    }

    /// Whether it already records for `overdrive-profile run`.
    pub(crate) fn is_claimed(&self) -> bool {
        self.claim.is_some()
    }

    /// Adds a note to the record.
    #[cfg(feature = "record")]
    pub(crate) fn note(mut self, note: &'static str) -> Self {
        self.note = Some(note);
        self
    }

    /// Begins to record.
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
        run.memory_forecast = self.memory_forecast;
        run.notes.extend(self.note.map(str::to_owned));
        (run.rank, run.world_size) = rank_of_environment();
        if let Some(folder) = &self.folder {
            std::fs::create_dir_all(folder).map_err(|error| ProfileError::Io {
                path: folder.clone(),
                action: "create the folder",
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

/// A recording in progress.
pub(crate) struct Recorder {
    run: RunProfile,
    folder: Option<PathBuf>,
    /// None if only the program itself asked to record.
    claim: Option<Claim>,
    device: Device,
    retries_before: Option<u64>,
    /// By the timer's clock.
    began: Duration,
    monitor: Monitor,
    /// None after the profiled steps, or if none are wanted.
    profiler: Option<SteppedProfiler>,
    trace: Option<TraceWriter>,
    /// Whether the trace was being written when the current step began.
    is_writing: bool,
}

impl Recorder {
    /// When the recording began, by the timer's clock.
    pub(crate) fn began(&self) -> Duration {
        self.began
    }

    /// A step has ended and the next one begins. `clock` is the timer's; `fill` adds the timer's data if a file is
    /// written.
    pub(crate) fn step_ended(&mut self, clock: &dyn Fn() -> Duration, fill: impl FnOnce(&mut RunProfile)) -> NextStep {
        let Some(profiler) = &mut self.profiler else { return self.step_after_profile() };
        let next = profiler.step(clock).unwrap_or_else(|error| {
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

    /// The thread that writes the trace slows steps down as well.
    fn step_after_profile(&mut self) -> NextStep {
        let is_still_writing = self.trace.as_ref().is_some_and(|trace| !trace.is_finished());
        let is_done = self.is_writing && !is_still_writing;
        self.is_writing &= is_still_writing;
        if is_done { NextStep::Timed } else { NextStep::Unchanged }
    }

    /// Ends the recording after the last step. `fill` adds the timer's data.
    pub(crate) fn finish(mut self, fill: impl FnOnce(&mut RunProfile)) -> Result<RunProfile, ProfileError> {
        self.take_profile();
        self.monitor.stop();
        self.update(fill);
        if let Some(trace) = self.trace.take()
            && let Err(error) = trace.wait()
        {
            self.run.notes.push(format!("the trace: {error}"));
        }
        self.run.notes.extend(self.claim.as_ref().and_then(Claim::refused_note));
        self.write()?;
        Ok(self.run)
    }

    /// Ends without a record, and removes files that were already written.
    #[cfg(feature = "record")]
    pub(crate) fn discard(mut self) {
        if let Some(trace) = self.trace.take() {
            // Ignored: a trace that could not be written need not be removed.
            let _ = trace.wait();
        }
        for path in [self.path("profile", "json"), self.path("trace", "json.gz")].into_iter().flatten() {
            // Ignored: the files do not exist before the profiler is done.
            let _ = std::fs::remove_file(path);
        }
    }

    /// Writes the record so far, in case the program is killed.
    fn write_so_far(&mut self, fill: impl FnOnce(&mut RunProfile)) {
        if self.folder.is_some() {
            self.update(fill);
            if let Err(error) = self.write() {
                self.run.notes.push(error.to_string());
            }
        }
    }

    fn update(&mut self, fill: impl FnOnce(&mut RunProfile)) {
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

    /// Ends the profiler and stores its profile.
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

/// From `RANK` and `WORLD_SIZE`, as launchers set them.
fn rank_of_environment() -> (u64, u64) {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    match (number("RANK"), number("WORLD_SIZE")) {
        (Some(rank), Some(size)) if rank < size => (rank, size),
        _ => (0, 1),
    }
}
