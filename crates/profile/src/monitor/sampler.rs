//! Takes samples. Reads no clock: the caller passes the time.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::gap::Gaps;
use super::{CacheSample, Counters, GapSource, GpuSource, MonitorGap, Nvml, Rates, Sample, usage};

/// A larger difference between the system's clock and the monotonic one, from sample to sample, means that the clock
/// was set; in seconds.
const CLOCK_DRIFT_SECONDS: f64 = 1.0;

/// Takes samples when called, for use in the caller's own loop. A [`Monitor`](super::Monitor) runs one on a thread.
///
/// ```
/// use overdrive_profile::Sampler;
/// use std::time::{Duration, Instant, SystemTime};
///
/// let (mut sampler, begun) = (Sampler::new(), Instant::now());
/// let sample = sampler.sample_at(begun.elapsed(), SystemTime::now());
/// println!("{sample}");
/// ```
pub struct Sampler {
    gpus: Option<Box<dyn GpuSource>>,
    /// When the last sample was taken, by both clocks.
    last: Option<(Duration, SystemTime)>,
    /// The last counters and their time, so that rates are right even across a gap.
    system: Option<(Duration, Counters)>,
    process: Option<(Duration, Counters)>,
    had_gpus: bool,
    watches_threads: bool,
    gaps: Gaps,
}

impl Default for Sampler {
    fn default() -> Self {
        Self::new()
    }
}

impl Sampler {
    /// A sampler of the machine, the process, and the GPUs that NVML finds.
    pub fn new() -> Self {
        Self::with_gpus(Some(Box::new(Nvml::new())))
    }

    /// The same with another source of GPU samples, or none.
    pub fn with_gpus(gpus: Option<Box<dyn GpuSource>>) -> Self {
        Self {
            gpus,
            last: None,
            system: None,
            process: None,
            had_gpus: false,
            watches_threads: false,
            gaps: Gaps::default(),
        }
    }

    /// Also samples each thread of this process.
    ///
    /// # Syncs
    /// No. A sample takes about 20 us more per thread.
    pub fn threads(mut self, watch: bool) -> Self {
        self.watches_threads = watch;
        self
    }

    /// Takes a sample.
    ///
    /// `elapsed` is the time since sampling began by a monotonic clock, such as `Instant`; rates are based on it. If it
    /// stands still or runs backwards, there are no rates, and a gap is added. `wall` is the sample's label; if that
    /// clock was set since the last sample, a gap is added too.
    ///
    /// # Syncs
    /// No. NVML takes up to 40 ms per GPU.
    pub fn sample_at(&mut self, elapsed: Duration, wall: SystemTime) -> Sample {
        self.check_clocks(elapsed, wall);
        let mut sample = Sample {
            unix_seconds: unix_seconds(wall),
            elapsed_seconds: elapsed.as_secs_f64(),
            system: self.seen(GapSource::System, elapsed, usage::system()),
            process: self.seen(GapSource::Process, elapsed, usage::process()),
            caches: CacheSample::now(),
            gpus: Vec::new(),
            threads: Vec::new(),
        };
        if self.watches_threads {
            sample.threads = self.seen(GapSource::Process, elapsed, usage::threads()).unwrap_or_default();
        }
        if let Some(system) = &mut sample.system {
            system.rates = rates(&mut self.system, system.counters, elapsed);
        }
        if let Some(process) = &mut sample.process {
            process.rates = rates(&mut self.process, process.counters, elapsed);
        }
        if let Some(gpus) = self.gpus.take() {
            self.ask(gpus, elapsed, &mut sample);
        }
        sample
    }

    /// Samples the GPUs. A source that panics is dropped, because its state cannot be trusted any more.
    fn ask(&mut self, mut gpus: Box<dyn GpuSource>, elapsed: Duration, sample: &mut Sample) {
        let asked = catch_unwind(AssertUnwindSafe(|| {
            let count = self.seen(GapSource::Gpus, elapsed, gpus.count()).unwrap_or(0);
            self.had_gpus |= count > 0;
            for index in 0..count {
                let gpu = gpus.sample(index);
                sample.gpus.extend(self.seen(GapSource::Gpu(index), elapsed, gpu));
            }
        }));
        let Err(panic) = asked else {
            self.gpus = Some(gpus);
            return;
        };
        // Dropping it may panic as well.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(gpus)));
        let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref().copied());
        let reason = format!("the source of GPUs panicked, and is not asked again: {}", text.unwrap_or("no text"));
        tracing::error!("{reason}");
        // A gap may be open because it did not answer before. It is closed, and a new one is opened with this reason.
        self.gaps.close(GapSource::Gpus, elapsed);
        self.gaps.open(GapSource::Gpus, elapsed, reason);
    }

    /// The gaps so far, or the last 256 of them.
    pub fn gaps(&self) -> Vec<MonitorGap> {
        self.gaps.list()
    }

    pub(super) fn gaps_mut(&mut self) -> &mut Gaps {
        &mut self.gaps
    }

    /// Closes the source's gap if something was found; else opens one, and logs that once.
    fn seen<T, E: std::fmt::Display>(&mut self, source: GapSource, at: Duration, found: Result<T, E>) -> Option<T> {
        match found {
            Ok(found) => {
                self.gaps.close(source, at);
                Some(found)
            }
            Err(error) => {
                if self.gaps.open(source, at, &error) {
                    if source == GapSource::Gpus && !self.had_gpus {
                        tracing::info!(%error, "no GPUs are monitored");
                    } else {
                        tracing::warn!(%source, %error, "the monitor has a gap");
                    }
                }
                None
            }
        }
    }

    fn check_clocks(&mut self, elapsed: Duration, wall: SystemTime) {
        let Some((last, last_wall)) = self.last.replace((elapsed, wall)) else { return };
        let Some(time) = elapsed.checked_sub(last).filter(|time| !time.is_zero()) else {
            self.gaps.note(GapSource::Clock, elapsed, last, "the clock stood still or ran backwards".to_owned());
            return;
        };
        let jump = unix_seconds(wall) - unix_seconds(last_wall) - time.as_secs_f64();
        if jump.abs() > CLOCK_DRIFT_SECONDS {
            let reason = format!("the system's clock jumped by {jump:.3} s");
            self.gaps.note(GapSource::Clock, last, elapsed, reason);
        }
    }
}

impl std::fmt::Debug for Sampler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sampler").field("last", &self.last).field("gaps", &self.gaps).finish_non_exhaustive()
    }
}

fn rates(last: &mut Option<(Duration, Counters)>, now: Counters, at: Duration) -> Option<Rates> {
    let (before, counters) = last.replace((at, now))?;
    now.rates_since(&counters, at.checked_sub(before)?)
}

/// Negative before 1970.
fn unix_seconds(wall: SystemTime) -> f64 {
    match wall.duration_since(UNIX_EPOCH) {
        Ok(since) => since.as_secs_f64(),
        Err(before) => -before.duration().as_secs_f64(),
    }
}
