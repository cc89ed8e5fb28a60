//! The settings of a step timer.

use std::time::{Duration, Instant};

use overdrive_ffi::TimedEvent;
use tch::Device;

use super::StepTimer;
use super::device::DeviceTimeline;
use super::timeline::Timeline;
use crate::run::Claim;
use crate::{ProfileError, RunRecorder};

/// The largest window; its records take about 150 MB.
const LONGEST_WINDOW: usize = 1 << 20;

/// Sets up a [`StepTimer`]. Made by [`StepTimer::builder`].
#[must_use = "a builder does nothing until it builds"]
pub struct StepTimerBuilder {
    device: Device,
    warmup_steps: u64,
    window: usize,
    flops_per_step: Option<f64>,
    peak_flops_per_second: Option<f64>,
    clock: Option<Box<dyn Fn() -> Duration + Send>>,
    recorder: Option<RunRecorder>,
}

impl StepTimerBuilder {
    pub(super) fn new() -> Self {
        Self {
            device: Device::Cpu,
            warmup_steps: 10,
            window: 1000,
            flops_per_step: None,
            peak_flops_per_second: None,
            clock: None,
            recorder: None,
        }
    }

    /// The device that the phases' work runs on. On a CUDA device, each phase is also timed by events on the current
    /// stream. The default is the CPU, for which the host's clock is enough.
    pub fn device(mut self, device: Device) -> Self {
        self.device = device;
        self
    }

    /// How many of the first steps are left out; the default is 10.
    pub fn warmup_steps(mut self, steps: u64) -> Self {
        self.warmup_steps = steps;
        self
    }

    /// How many of the last steps are kept for the report; the default is 1000.
    pub fn window(mut self, steps: usize) -> Self {
        self.window = steps;
        self
    }

    /// Floating point operations of a step, forward and backward, as the model requires them: a multiply-add counts as
    /// two. With [`peak_flops_per_second`](Self::peak_flops_per_second), the report has the MFU.
    #[doc(alias = "MFU")]
    pub fn flops_per_step(mut self, flops: f64) -> Self {
        self.flops_per_step = Some(flops);
        self
    }

    /// The device's peak floating point operations per second for the data type in use, from its data sheet.
    pub fn peak_flops_per_second(mut self, flops: f64) -> Self {
        self.peak_flops_per_second = Some(flops);
        self
    }

    /// The caller's clock in place of the host's monotonic one: the time since some fixed moment. For simulations and
    /// tests. Time that runs backwards counts as 0, and the report counts how often.
    pub fn clock(mut self, clock: impl Fn() -> Duration + Send + 'static) -> Self {
        self.clock = Some(Box::new(clock));
        self
    }

    /// Also records the run, for [`StepTimer::finish`]: the machine, and a few steps under the profiler. The timer has
    /// to stay on the training thread.
    ///
    /// With the feature `record`, a program under `overdrive-profile run` records even without this; with it, it
    /// records into that run's folder.
    pub fn record(mut self, recorder: RunRecorder) -> Self {
        self.recorder = Some(recorder);
        self
    }

    /// Builds the timer. The first step begins with the first phase.
    ///
    /// # Errors
    /// `Setting` for a window of 0 or of more than 2^20 steps, or operations that are not above 0; `Torch` when there
    /// is no such CUDA device. With a recorder: `Setting` for steps and intervals out of bounds, `Io` for a folder that
    /// cannot be created.
    pub fn build(self) -> Result<StepTimer, ProfileError> {
        if !(1..=LONGEST_WINDOW).contains(&self.window) {
            let problem = format!("should be from 1 to {LONGEST_WINDOW} steps");
            return Err(ProfileError::Setting { name: "window", value: self.window.to_string(), problem });
        }
        let flops = [("flops_per_step", self.flops_per_step), ("peak_flops_per_second", self.peak_flops_per_second)];
        for (name, value) in flops {
            if let Some(value) = value.filter(|value| !(value.is_finite() && *value > 0.0)) {
                let problem = "should be a number above 0".to_owned();
                return Err(ProfileError::Setting { name, value: value.to_string(), problem });
            }
        }
        let device = match self.device {
            Device::Cuda(index) => Some(DeviceTimeline::new(move || TimedEvent::new(index))?),
            _ => None,
        };
        let clock = self.clock.unwrap_or_else(|| {
            let begun = Instant::now();
            Box::new(move || begun.elapsed())
        });
        let peak_steps_per_second = self.flops_per_step.zip(self.peak_flops_per_second).map(|(step, peak)| peak / step);
        let recorder = by_environment(self.recorder)?;
        let recorder = recorder.map(|it| it.start(self.device, self.warmup_steps, clock())).transpose()?;
        let timeline = Timeline::new(self.warmup_steps, self.window, device);
        Ok(StepTimer::new(clock, timeline, peak_steps_per_second, recorder))
    }
}

/// The recorder that the environment asks for, else the program's own.
fn by_environment(own: Option<RunRecorder>) -> Result<Option<RunRecorder>, ProfileError> {
    #[cfg(feature = "record")]
    super::unmarked::stop_on_this_thread();
    if own.as_ref().is_some_and(RunRecorder::is_claimed) {
        return Ok(own);
    }
    match Claim::take() {
        Some(claim) => own.unwrap_or_default().claimed(claim).map(Some),
        None => Ok(own),
    }
}

impl std::fmt::Debug for StepTimerBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StepTimerBuilder")
            .field("device", &self.device)
            .field("warmup_steps", &self.warmup_steps)
            .field("window", &self.window)
            .finish_non_exhaustive()
    }
}
