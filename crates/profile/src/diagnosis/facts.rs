//! Figures that several rules need.

use super::LEAST_SHARE;
use super::finding::{Bottleneck, Finding};
use super::watched::{Skipped, ThreadUse};
use crate::{HostGap, Phase, ProfiledSteps, RunProfile, Sample, Straggler, stragglers};

/// How many robust standard deviations a slow rank is above the others.
const DEVIATIONS: f64 = 3.0;

/// A run in which steps were timed.
pub(super) struct Facts<'a> {
    pub run: &'a RunProfile,
    /// Seconds of the mean step.
    pub step_seconds: f64,
    /// The samples taken during steps, without times that the timer skipped; all samples, if those are too few.
    pub samples: Vec<&'a Sample>,
    /// The process's threads during these samples.
    pub threads: Vec<ThreadUse<'a>>,
    /// Ranks whose median is slower than the others', the slowest first; `rank` is the index of the report.
    pub stragglers: Vec<Straggler>,
}

impl<'a> Facts<'a> {
    /// None without a timed step.
    pub fn of(run: &'a RunProfile) -> Option<Self> {
        let step_seconds = run.mean_step_seconds().filter(|seconds| *seconds > 0.0)?;
        let skipped = Skipped::of(run);
        let samples = skipped.samples(run);
        // Reports with invalid times name no rank.
        let stragglers = stragglers(&run.ranks, DEVIATIONS).unwrap_or_default();
        Some(Self { run, step_seconds, threads: skipped.threads(&samples, run.timer_thread), samples, stragglers })
    }

    /// Mean seconds from the start of a step to that of the next, including skipped time in between.
    pub fn step_seconds_with_skipped(&self) -> f64 {
        let times = &self.run.step_times;
        let ends = times.first().zip(times.last()).filter(|(first, last)| first.step < last.step);
        let each = ends.map(|(first, last)| {
            let seconds = last.start_seconds + last.total_seconds() - first.start_seconds;
            seconds / (last.step - first.step + 1) as f64
        });
        each.filter(|seconds| *seconds > 0.0).unwrap_or(self.step_seconds)
    }

    /// Only the samples taken from the first step to the last, however few there are.
    pub fn samples_of_steps(&self) -> impl Iterator<Item = &'a Sample> {
        let times = &self.run.step_times;
        let span = times.first().zip(times.last());
        let is_of_steps = move |sample: &&Sample| {
            span.is_none_or(|(first, last)| {
                (first.start_seconds..=last.start_seconds + last.total_seconds()).contains(&sample.elapsed_seconds)
            })
        };
        self.samples.iter().copied().filter(is_of_steps)
    }

    /// Seconds of a phase in the mean timed step, without the profiler.
    pub fn seconds(&self, phase: Phase) -> f64 {
        self.run.share(phase) * self.step_seconds
    }

    /// Corrects seconds of a profiled step: subtracts the waiting for a CPU, and the profiler's overhead for these
    /// `calls` of operators.
    pub fn unprofiled(&self, phase: Phase, profiled_seconds: f64, calls: f64) -> f64 {
        let on_cpu = 1.0 - self.profiled_queued_share();
        (on_cpu * profiled_seconds - calls * self.overhead_per_call(phase)).min(self.seconds(phase)).max(0.0)
    }

    /// Seconds that the profiler adds to each call of an operator in a phase: 0 if nothing was profiled there.
    pub fn overhead_per_call(&self, phase: Phase) -> f64 {
        let Some(times) = self.profiled().and_then(|profiled| profiled.phase(phase)) else { return 0.0 };
        let on_cpu = 1.0 - self.profiled_queued_share();
        let added = (on_cpu * times.seconds - self.seconds(phase)).max(0.0);
        if times.calls > 0.0 { added / times.calls } else { 0.0 }
    }

    /// The same, but assumes the phase's average profiler overhead.
    pub fn unprofiled_share(&self, phase: Phase, profiled_seconds: f64) -> f64 {
        let whole = self.profiled().and_then(|profiled| profiled.phase(phase)).map_or(0.0, |times| times.seconds);
        if whole > 0.0 { self.seconds(phase) * (profiled_seconds / whole).clamp(0.0, 1.0) } else { 0.0 }
    }

    /// The share of the profiled steps in which the training thread waited for a CPU; 0 if unknown.
    fn profiled_queued_share(&self) -> f64 {
        let queued = |profiled: &ProfiledSteps| Some(profiled.queued_seconds? / profiled.step_seconds);
        self.profiled().and_then(queued).unwrap_or(0.0).clamp(0.0, 1.0)
    }

    pub fn profiled(&self) -> Option<&'a ProfiledSteps> {
        self.run.profiled.as_ref()
    }

    /// Loops that read many numbers out of tensors in a step.
    pub fn read_back_loops(&self) -> impl Iterator<Item = &'a HostGap> {
        /// Losses, metrics and a few checks read fewer.
        const LEAST_NUMBERS: f64 = 32.0;
        self.profiled().into_iter().flat_map(|it| &it.read_backs).filter(|it| it.calls >= LEAST_NUMBERS)
    }

    /// CPUs that this process leaves free; threads that wait for a CPU count as using one. With several ranks, CPUs
    /// that no process on the machine uses. With one rank, other programs are ignored, because they come and go.
    pub fn free_cpus(&self) -> Option<f64> {
        let used = if self.run.world_size > 1 {
            // In a container with fewer CPUs than the machine, the machine's figures do not apply.
            let systems = self.samples.iter().filter_map(|sample| sample.system);
            mean(systems.filter(|it| it.cpus <= self.run.machine.cpus).filter_map(|it| it.rates?.cpus_busy))
        } else {
            None
        };
        let own = || self.threads.iter().map(|thread| thread.busy + thread.queued).sum::<f64>();
        let used = used.or_else(|| (!self.threads.is_empty()).then(own))?;
        Some((f64::from(self.run.machine.cpus) - used).max(0.0))
    }

    /// The share of the time in which the training thread, or a thread of libtorch's pool that it then waits for,
    /// waited for a CPU. Pool threads have the training thread's name.
    pub fn compute_queued_share(&self) -> Option<f64> {
        let main = self.main_thread()?;
        let helpers = self.threads.iter().find(|it| !it.is_main && it.name == main.name && it.count > 0.0);
        Some(helpers.map_or(0.0, |it| it.queued / it.count.max(1.0)).max(main.queued).clamp(0.0, 1.0))
    }

    /// Seconds of a step in which the training thread waited for a CPU.
    pub fn queued_seconds(&self) -> f64 {
        self.main_thread().map_or(0.0, |main| main.queued) * self.step_seconds
    }

    /// Seconds of a step in which a rank waited for a CPU; 0 if unknown. `place` is the index of its report.
    pub fn rank_queued_seconds(&self, place: usize) -> f64 {
        let share = self.run.rank_info.get(place).and_then(|info| info.queued_share);
        share.unwrap_or(0.0) * self.step_seconds
    }

    /// The training thread.
    pub fn main_thread(&self) -> Option<&ThreadUse<'a>> {
        self.threads.iter().find(|thread| thread.is_main)
    }

    /// A finding, if it takes at least [`LEAST_SHARE`] of a step.
    pub fn finding(&self, bottleneck: Bottleneck, seconds: f64) -> Option<Finding> {
        let seconds = seconds.clamp(0.0, self.step_seconds);
        let share = seconds / self.step_seconds;
        let finding = || Finding { seconds_per_step: seconds, share, ..Finding::without_bound(bottleneck) };
        (share >= LEAST_SHARE).then(finding)
    }

    /// "12.3 of 45.6 ms".
    pub fn of_step(&self, seconds: f64) -> String {
        format!("{:.2} of {:.2} ms", 1e3 * seconds, 1e3 * self.step_seconds)
    }
}

impl Finding {
    /// A finding that ends the run, or whose cost is not known.
    pub(super) fn without_bound(bottleneck: Bottleneck) -> Self {
        Self {
            bottleneck,
            seconds_per_step: 0.0,
            share: 0.0,
            bytes_per_step: 0.0,
            scope: None,
            op: None,
            evidence: Vec::new(),
            remedy: String::new(),
        }
    }

    pub(super) fn evidence(mut self, figure: impl Into<String>) -> Self {
        self.evidence.push(figure.into());
        self
    }

    pub(super) fn evidence_if(self, is_so: bool, figure: impl FnOnce() -> String) -> Self {
        if is_so { self.evidence(figure()) } else { self }
    }

    pub(super) fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = remedy.into();
        self
    }

    pub(super) fn scope(mut self, scope: Option<&str>) -> Self {
        self.scope = scope.map(str::to_owned);
        self
    }

    pub(super) fn op(mut self, op: Option<&str>) -> Self {
        self.op = op.map(str::to_owned);
        self
    }
}

pub(super) fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (count, sum) = values.fold((0.0, 0.0), |(count, sum), value| (count + 1.0, sum + value));
    (count > 0.0).then(|| sum / count)
}
