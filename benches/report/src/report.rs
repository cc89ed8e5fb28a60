//! The report of the technique benchmark: its JSON form, and how it is made from what was measured.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::verdict::{Comparison, GoalResult};
use crate::{Contender, DeviceKind, Machine, Mark, Measured, Span, Spread, Workload, stats::median, verdict};

/// The version of the JSON form; a field that is added leaves it as it is.
pub const SCHEMA: u32 = 2;

/// A contender may lose at most this much accuracy against plain tch, in percentage points.
pub const GUARD_POINTS: f64 = 0.5;
/// Without a test set, its last loss may exceed plain tch's by at most this share.
pub const GUARD_LOSS: f64 = 0.02;

/// Names of the software that took part, each with its version.
pub type Versions = BTreeMap<String, String>;

/// The results of a run of the technique benchmark.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: u32,
    /// What it ran on, with which software and options.
    #[serde(flatten)]
    pub setting: Setting,
    /// One per workload, in the order of [`Workload::ALL`].
    pub workloads: Vec<WorkloadReport>,
    /// The conclusion: a headline, then one sentence per line.
    pub conclusion: Vec<String>,
}

/// The machine, software and options of a report.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Setting {
    /// When it was measured, as [`crate::date::utc_now`] writes it.
    pub measured_at: String,
    /// Whether all contenders of a seed began with the same weights, PyTorch's; older records have tch's in our columns.
    #[serde(default)]
    pub same_initial_weights: bool,
    /// How long the benchmark took, without building it.
    #[serde(default)]
    pub run_seconds: Option<f64>,
    /// The machine.
    pub machine: Machine,
    /// The software.
    pub versions: Versions,
    /// The device that trained.
    pub device: DeviceKind,
    /// `quick`, `default` or `full`.
    pub size: String,
    /// Rounds: in each, every contender takes a turn.
    pub rounds: u32,
    /// Seeds of the whole trainings; empty without whole trainings.
    pub seeds: Vec<u32>,
    /// The most threads that a contender may compute with.
    pub threads: u32,
    /// How it was measured, one paragraph per entry.
    pub method: Vec<String>,
    /// Workloads that failed as a whole, each with the reason.
    #[serde(default)]
    pub failures: Vec<String>,
}

/// The raw measurements of a workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measurements {
    /// The workload.
    pub workload: Workload,
    /// Sentences about its data and model.
    pub facts: Vec<String>,
    /// One per contender, in the order of the rows.
    pub measured: Vec<Measured>,
    /// Contenders that could not run, each with the reason.
    pub absent: Vec<(Contender, String)>,
    /// The techniques of `combined`.
    pub parts: Vec<Contender>,
    /// The techniques that `combined` tried and that gained nothing.
    #[serde(default)]
    pub left_out: Vec<Contender>,
    /// What would help `combined` next according to the diagnosis, one sentence each.
    pub next: Vec<String>,
}

/// The results of one workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkloadReport {
    /// The raw measurements.
    #[serde(flatten)]
    pub measurements: Measurements,
    /// One per contender.
    pub rows: Vec<Row>,
    /// The goals of `combined`, and whether they were met.
    pub goals: Vec<GoalResult>,
}

/// The results of one contender.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The contender.
    pub contender: Contender,
    /// Samples per second, over the rounds.
    pub rate: Option<Spread>,
    /// Share of the time that the training thread spent in getting data, from 0 to 1.
    pub wait_share: Option<f64>,
    /// Its speed relative to Python's as written and to plain tch's, if those ran.
    pub against: Vec<Comparison>,
    /// Seconds of a whole training, over the seeds.
    pub seconds: Option<Spread>,
    /// Share of the test images classified correctly at the end; the median over the seeds.
    pub accuracy: Option<f64>,
    /// The last training loss; the median over the seeds.
    pub loss: Option<f64>,
    /// Seconds until the target was first reached, the median over the seeds; absent unless every seed reached it.
    pub seconds_to_target: Option<f64>,
    /// Whether it learned as well as plain tch; absent unless both were trained from start to end.
    pub kept: Option<bool>,
    /// The marks of the whole trainings, each value the median over the seeds.
    pub curve: Vec<Mark>,
    /// How many of its timings were disturbed, even after repetitions.
    pub disturbed: usize,
}

impl Report {
    /// Makes the report of the measurements.
    pub fn new(setting: Setting, measurements: Vec<Measurements>) -> Self {
        let workloads: Vec<WorkloadReport> =
            measurements.into_iter().map(|it| WorkloadReport::new(it, &setting)).collect();
        let conclusion = verdict::conclusion(&workloads, &setting);
        Self { schema: SCHEMA, setting, workloads, conclusion }
    }

    /// The same measurements as today's rules read them: a record may be older than these.
    pub fn read_anew(self) -> Self {
        Self::new(self.setting, self.workloads.into_iter().map(|it| it.measurements).collect())
    }

    /// The JSON form, indented.
    ///
    /// # Errors
    /// Never in practice: all of it has a JSON form.
    pub fn to_json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self).map(|json| json + "\n")
    }
}

impl WorkloadReport {
    fn new(measurements: Measurements, setting: &Setting) -> Self {
        let rows = measurements.measured.iter().map(|one| row(one, &measurements)).collect();
        let goals = verdict::goals(&measurements, setting);
        Self { measurements, rows, goals }
    }

    /// The row of a contender, if it ran.
    pub fn row(&self, contender: Contender) -> Option<&Row> {
        self.rows.iter().find(|row| row.contender == contender)
    }
}

impl Measurements {
    /// The measurements of a contender, if it ran.
    pub fn of(&self, contender: Contender) -> Option<&Measured> {
        self.measured.iter().find(|measured| measured.contender == contender)
    }

    /// The target of a whole training: what each contender reached with each seed on 2 cores. Photographs have a loss,
    /// because one of their 64 test images is 1.6 points of accuracy.
    pub fn target(&self) -> Target {
        match self.workload {
            Workload::Digits => Target::Accuracy(0.97),
            Workload::Photos => Target::Loss(1.3),
            Workload::Text => Target::Loss(2.45),
        }
    }
}

/// The target of a whole training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Target {
    /// This share of the test images or more, from 0 to 1.
    Accuracy(f64),
    /// This mean training loss or less.
    Loss(f64),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Accuracy(least) => write!(f, "{}%", least * 100.0),
            Self::Loss(most) => write!(f, "loss {most}"),
        }
    }
}

impl Target {
    /// How far a mark is past the target; below 0 before it.
    fn past(self, mark: &Mark) -> Option<f64> {
        match self {
            Self::Accuracy(least) => Some(mark.accuracy? - least),
            Self::Loss(most) => Some(most - mark.loss?),
        }
    }

    /// When the marks pass it: on the line between the marks before and after, or at the first mark if that is past it.
    fn reached(self, marks: &[Mark]) -> Option<f64> {
        let mut before: Option<(f64, f64)> = None;
        for mark in marks {
            let past = self.past(mark)?;
            if past >= 0.0 {
                let between =
                    |(seconds, short): (f64, f64)| seconds + (mark.seconds - seconds) * short / (short - past);
                return Some(before.map_or(mark.seconds, between));
            }
            before = Some((mark.seconds, past));
        }
        None
    }
}

fn row(one: &Measured, all: &Measurements) -> Row {
    let rates: Vec<f64> = one.turns.iter().map(|turn| turn.rate()).collect();
    let waits = one.turns.iter().map(|turn| turn.wait_seconds / turn.seconds);
    let of_wholes = |value: &dyn Fn(&Mark) -> Option<f64>| {
        let last: Option<Vec<f64>> = one.wholes.iter().map(|whole| value(whole.marks.last()?)).collect();
        last.and_then(|values| median(&values))
    };
    let to_target: Option<Vec<f64>> = one.wholes.iter().map(|whole| all.target().reached(&whole.marks)).collect();
    let disturbances = one.turns.iter().map(|turn| turn.disturbance).chain(one.wholes.iter().map(|it| it.disturbance));
    let (accuracy, loss) = (of_wholes(&|mark| mark.accuracy), of_wholes(&|mark| mark.loss));
    let others = [Contender::Pytorch, Contender::Tch].into_iter().filter(|other| *other != one.contender);
    Row {
        contender: one.contender,
        rate: Spread::of(&rates),
        wait_share: median(&waits.collect::<Vec<_>>()),
        against: others.filter_map(|other| Comparison::of_turns(one, all.of(other)?)).collect(),
        seconds: Spread::of(&one.wholes.iter().map(|whole| whole.seconds).collect::<Vec<_>>()),
        seconds_to_target: to_target.and_then(|seconds| median(&seconds)),
        kept: all.of(Contender::Tch).and_then(|tch| kept(one, tch, all.workload)),
        curve: curve(one),
        disturbed: disturbances.filter(|it| it.is_too_much()).count(),
        accuracy,
        loss,
    }
}

/// Whether one learned as well as the other: by accuracy, and without a large test set by loss.
pub(crate) fn kept(one: &Measured, other: &Measured, workload: Workload) -> Option<bool> {
    let last = |of: &Measured, value: fn(&Mark) -> Option<f64>| {
        let values: Option<Vec<f64>> = of.wholes.iter().map(|whole| value(whole.marks.last()?)).collect();
        values.and_then(|values| median(&values))
    };
    let both = |value: fn(&Mark) -> Option<f64>| last(one, value).zip(last(other, value));
    match both(|mark| mark.accuracy).filter(|_| workload == Workload::Digits) {
        Some((ours, theirs)) => Some((ours - theirs) * 100.0 >= -GUARD_POINTS - 1e-9),
        None if other.wholes.is_empty() || one.wholes.is_empty() => None,
        // A loss that is not finite counts as not learned.
        None => Some(both(|mark| mark.loss).is_some_and(|(ours, theirs)| ours <= theirs * (1.0 + GUARD_LOSS))),
    }
}

/// The medians of each mark that all seeds reached.
fn curve(one: &Measured) -> Vec<Mark> {
    let marks = one.wholes.iter().map(|whole| whole.marks.len()).min().unwrap_or(0);
    let middle = |mark: usize, value: &dyn Fn(&Mark) -> Option<f64>| {
        let values: Option<Vec<f64>> = one.wholes.iter().map(|whole| value(&whole.marks[mark])).collect();
        values.and_then(|values| median(&values))
    };
    let mark = |at| Mark {
        seconds: middle(at, &|mark| Some(mark.seconds)).unwrap_or(f64::NAN),
        loss: middle(at, &|mark| mark.loss),
        accuracy: middle(at, &|mark| mark.accuracy),
    };
    (0..marks).map(mark).collect()
}

/// The first `steps` steps of a timeline, at most.
pub fn first_steps(timeline: &[Span], steps: usize) -> &[Span] {
    let begins = timeline.iter().enumerate().filter(|(_, span)| span.phase == FIRST_PHASE).map(|(at, _)| at);
    let end = begins.skip(1).nth(steps.saturating_sub(1)).unwrap_or(timeline.len());
    &timeline[..end]
}

/// The first phase of a step.
pub const FIRST_PHASE: &str = "data wait";

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
