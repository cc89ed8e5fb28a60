//! Samples of the machine that were taken while the steps ran.

use std::collections::BTreeMap;

use crate::{RunProfile, Sample};

/// The minimum number of samples, or pairs of samples.
const ENOUGH: usize = 3;
/// Gaps under 1 ms are rounding in the timer.
const SHORTEST_SECONDS: f64 = 1e-3;
/// At most this share of the time between two samples may be skipped time.
const MOST_SKIPPED: f64 = 0.1;

/// The mean activity of all threads of one name.
pub(super) struct ThreadUse<'a> {
    pub name: &'a str,
    pub is_main: bool,
    /// How many of them exist, on average.
    pub count: f64,
    /// How many of them are on a CPU, on average.
    pub busy: f64,
    /// How many of them wait for a CPU, on average.
    pub queued: f64,
}

/// Time between steps that belongs to none of them, such as a validation that the timer was told to skip.
pub(super) struct Skipped {
    /// Start and end of each gap, in order.
    spans: Vec<(f64, f64)>,
    /// When the first step began and the last one ended.
    steps: (f64, f64),
}

impl Skipped {
    pub fn of(run: &RunProfile) -> Self {
        let ends = run.step_times.iter().map(|step| (step.start_seconds, step.start_seconds + step.total_seconds()));
        let steps: Vec<(f64, f64)> = ends.collect();
        let gaps = steps.windows(2).map(|pair| (pair[0].1, pair[1].0));
        let from = steps.iter().map(|step| step.0).fold(f64::INFINITY, f64::min);
        let to = steps.iter().map(|step| step.1).fold(0.0, f64::max);
        Self { spans: gaps.filter(|(from, to)| to - from >= SHORTEST_SECONDS).collect(), steps: (from, to) }
    }

    /// Whether too much of the time from one sample to another is skipped time.
    fn is_skipped(&self, from: f64, to: f64) -> bool {
        let next = self.spans.partition_point(|span| span.1 <= from);
        let within = self.spans[next..].iter().take_while(|span| span.0 < to);
        let skipped: f64 = within.map(|span| (span.1.min(to) - span.0.max(from)).max(0.0)).sum();
        skipped > MOST_SKIPPED * (to - from)
    }

    /// The samples taken while the steps ran, if the time since the sample before was not skipped. If these are too
    /// few, all while the steps ran, else all.
    pub fn samples<'a>(&self, run: &'a RunProfile) -> Vec<&'a Sample> {
        let is_within = |sample: &&Sample| (self.steps.0..=self.steps.1).contains(&sample.elapsed_seconds);
        let within: Vec<_> = run.samples.iter().filter(is_within).collect();
        let is_of_steps = |&place: &usize| {
            let before = place.checked_sub(1).map_or(self.steps.0, |before| within[before].elapsed_seconds);
            !self.is_skipped(before, within[place].elapsed_seconds)
        };
        let of_steps: Vec<_> = (0..within.len()).filter(is_of_steps).map(|place| within[place]).collect();
        [of_steps, within].into_iter().find(|some| some.len() >= ENOUGH).unwrap_or_else(|| run.samples.iter().collect())
    }

    /// The activity of the threads between pairs of samples without skipped time; between all pairs, if those are too
    /// few.
    pub fn threads<'a>(&self, samples: &[&'a Sample], main: i32) -> Vec<ThreadUse<'a>> {
        let pairs = || samples.windows(2).map(|pair| (pair[0], pair[1]));
        let is_of_steps = |one: &Sample, other: &Sample| !self.is_skipped(one.elapsed_seconds, other.elapsed_seconds);
        let of_steps: Vec<_> = pairs().filter(|(one, other)| is_of_steps(one, other)).collect();
        threads(if of_steps.len() >= ENOUGH { of_steps } else { pairs().collect() }, main)
    }
}

fn threads<'a>(pairs: Vec<(&'a Sample, &'a Sample)>, main: i32) -> Vec<ThreadUse<'a>> {
    let mut uses: BTreeMap<(&str, bool), ThreadUse<'_>> = BTreeMap::new();
    let mut seconds = 0.0;
    for (first, second) in pairs {
        let time = second.elapsed_seconds - first.elapsed_seconds;
        if time <= 0.0 {
            continue;
        }
        seconds += time;
        for now in &second.threads {
            let Some(before) = first.threads.iter().find(|it| it.id == now.id) else { continue };
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
