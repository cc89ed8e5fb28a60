//! Figures that several rules need.

use std::collections::BTreeMap;

use super::LEAST_SHARE;
use super::finding::{Bottleneck, Finding};
use crate::{HostGap, Phase, ProfiledSteps, RunProfile, Sample};

/// A run in which steps were timed.
pub(super) struct Facts<'a> {
    pub run: &'a RunProfile,
    /// Seconds of the mean step.
    pub step_seconds: f64,
    /// Those taken while the steps ran; all, where there are few of them.
    pub samples: Vec<&'a Sample>,
    /// The process's threads while the steps ran.
    pub threads: Vec<ThreadUse<'a>>,
}

/// What a thread did, as shares of the time; of all threads of one name that came and went.
pub(super) struct ThreadUse<'a> {
    pub name: &'a str,
    pub is_main: bool,
    /// How many there were at once, on the mean.
    pub count: f64,
    /// How many CPUs they used.
    pub busy: f64,
    /// How many of them waited for a CPU.
    pub queued: f64,
}

impl<'a> Facts<'a> {
    /// None without a timed step.
    pub fn of(run: &'a RunProfile) -> Option<Self> {
        let step_seconds = run.mean_step_seconds().filter(|seconds| *seconds > 0.0)?;
        let samples = samples(run);
        Some(Self { run, step_seconds, threads: threads(&samples, run.timer_thread), samples })
    }

    /// Seconds of a phase in the mean step, which no profiler slowed down.
    pub fn seconds(&self, phase: Phase) -> f64 {
        self.run.share(phase) * self.step_seconds
    }

    /// Seconds that something would have taken without the profiler, which makes each call of an operator longer.
    pub fn unprofiled(&self, phase: Phase, profiled_seconds: f64, calls: f64) -> f64 {
        let Some(times) = self.profiled().and_then(|profiled| profiled.phase(phase)) else { return 0.0 };
        let whole = self.seconds(phase);
        let each = if times.calls > 0.0 { (times.seconds - whole).max(0.0) / times.calls } else { 0.0 };
        (profiled_seconds - calls * each).min(whole).max(0.0)
    }

    /// The same of what is as much calls as the phase itself.
    pub fn unprofiled_share(&self, phase: Phase, profiled_seconds: f64) -> f64 {
        let whole = self.profiled().and_then(|profiled| profiled.phase(phase)).map_or(0.0, |times| times.seconds);
        if whole > 0.0 { self.seconds(phase) * (profiled_seconds / whole).clamp(0.0, 1.0) } else { 0.0 }
    }

    pub fn profiled(&self) -> Option<&'a ProfiledSteps> {
        self.run.profiled.as_ref()
    }

    /// Loops that read so many numbers or more out of tensors in a step.
    pub fn read_back_loops(&self) -> impl Iterator<Item = &'a HostGap> {
        /// Losses, metrics and a few checks stay below.
        const LEAST_NUMBERS: f64 = 32.0;
        self.profiled().into_iter().flat_map(|it| &it.read_backs).filter(|it| it.calls >= LEAST_NUMBERS)
    }

    /// CPUs that this process leaves over: threads that wait for one leave none. Among ranks, CPUs that nobody uses. Other
    /// programs on the machine come and go.
    pub fn free_cpus(&self) -> Option<f64> {
        let used = if self.run.world_size > 1 {
            // Of a container, only the process's own part is known.
            let systems = self.samples.iter().filter_map(|sample| sample.system);
            mean(systems.filter(|it| it.cpus <= self.run.machine.cpus).filter_map(|it| it.rates?.cpus_busy))
        } else {
            None
        };
        let own = || self.threads.iter().map(|thread| thread.busy + thread.queued).sum::<f64>();
        let used = used.or_else(|| (!self.threads.is_empty()).then(own))?;
        Some((f64::from(self.run.machine.cpus) - used).max(0.0))
    }

    /// Seconds of a step in which the thread that trains waited for a CPU.
    pub fn queued_seconds(&self) -> f64 {
        self.main_thread().map_or(0.0, |main| main.queued) * self.step_seconds
    }

    /// The thread that trains.
    pub fn main_thread(&self) -> Option<&ThreadUse<'a>> {
        self.threads.iter().find(|thread| thread.is_main)
    }

    /// A finding, if it takes enough of a step.
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
    /// Something that ends a run, or whose cost is not known.
    pub(super) fn without_bound(bottleneck: Bottleneck) -> Self {
        Self {
            bottleneck,
            seconds_per_step: 0.0,
            share: 0.0,
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

fn samples(run: &RunProfile) -> Vec<&Sample> {
    const ENOUGH: usize = 3;
    let timed = || run.step_times.iter();
    let from = timed().map(|step| step.start_seconds).fold(f64::INFINITY, f64::min);
    let to = timed().map(|step| step.start_seconds + step.total_seconds()).fold(0.0, f64::max);
    let is_within = |sample: &&Sample| (from..=to).contains(&sample.elapsed_seconds);
    let within: Vec<_> = run.samples.iter().filter(is_within).collect();
    if within.len() >= ENOUGH { within } else { run.samples.iter().collect() }
}

fn threads<'a>(samples: &[&'a Sample], main: i32) -> Vec<ThreadUse<'a>> {
    let mut uses: BTreeMap<(&str, bool), ThreadUse<'a>> = BTreeMap::new();
    let mut seconds = 0.0;
    for pair in samples.windows(2) {
        let time = pair[1].elapsed_seconds - pair[0].elapsed_seconds;
        if time <= 0.0 {
            continue;
        }
        seconds += time;
        for now in &pair[1].threads {
            let Some(before) = pair[0].threads.iter().find(|it| it.id == now.id) else { continue };
            let is_main = now.id == main;
            let entry = uses.entry((&now.name, is_main)).or_insert_with(|| ThreadUse {
                name: &now.name,
                is_main,
                count: 0.0,
                busy: 0.0,
                queued: 0.0,
            });
            entry.count += time;
            entry.busy += (now.cpu_seconds - before.cpu_seconds).max(0.0);
            entry.queued += (now.queued_seconds - before.queued_seconds).max(0.0);
        }
    }
    let mut uses: Vec<_> = uses.into_values().collect();
    for thread in &mut uses {
        thread.count /= seconds;
        thread.busy /= seconds;
        thread.queued /= seconds;
    }
    uses
}
