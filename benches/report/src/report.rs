//! The report of the technique benchmark: its JSON form, and how it is made from what was measured.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::verdict::{Comparison, GoalResult};
use crate::{Contender, DeviceKind, Machine, Mark, Measured, Span, Spread, Workload, stats::median, verdict};

/// The version of the JSON form; a field that is added leaves it as it is.
pub const SCHEMA: u32 = 2;

/// The most that accuracy may fall below plain tch's, in percentage points, for a contender to have kept it.
pub const GUARD_POINTS: f64 = 0.5;
/// The most that the last loss may lie above plain tch's, as a share of it.
pub const GUARD_LOSS: f64 = 0.02;

/// Names of the software that took part, each with its version.
pub type Versions = BTreeMap<String, String>;

/// Everything that a run of the technique benchmark found out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: u32,
    /// What it ran on, with which software and options.
    #[serde(flatten)]
    pub setting: Setting,
    /// One each, in the order of [`Workload::ALL`].
    pub workloads: Vec<WorkloadReport>,
    /// What all of it comes to: a headline, then a sentence a line.
    pub conclusion: Vec<String>,
}

/// What the numbers of a report depend on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Setting {
    /// When it was measured, as [`crate::date::utc_now`] writes it.
    pub measured_at: String,
    /// The machine.
    pub machine: Machine,
    /// The software.
    pub versions: Versions,
    /// Where it trained.
    pub device: DeviceKind,
    /// `quick`, `default` or `full`.
    pub size: String,
    /// Rounds in which the contenders took turns.
    pub rounds: u32,
    /// Seeds of whole trainings; none where nothing was trained as a whole.
    pub seeds: Vec<u32>,
    /// The most threads that a contender computes with.
    pub threads: u32,
    /// How it was measured: what the clock includes and excludes, a sentence each.
    pub method: Vec<String>,
}

/// What was measured of a workload, before anything is made of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measurements {
    /// Which.
    pub workload: Workload,
    /// Its data and model, in a sentence each.
    pub facts: Vec<String>,
    /// One a contender, in the order of the rows.
    pub measured: Vec<Measured>,
    /// Contenders that are not there, each with the reason.
    pub absent: Vec<(Contender, String)>,
    /// What `combined` is made of.
    pub parts: Vec<Contender>,
    /// What the diagnosis of `combined` says would help next, a sentence each.
    pub next: Vec<String>,
}

/// One workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkloadReport {
    /// What was measured.
    #[serde(flatten)]
    pub measurements: Measurements,
    /// One a contender.
    pub rows: Vec<Row>,
    /// What `combined` was to reach.
    pub goals: Vec<GoalResult>,
}

/// What one contender did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Who.
    pub contender: Contender,
    /// Samples a second by round.
    pub rate: Option<Spread>,
    /// Share of its time in which the training thread was getting data, from 0 to 1.
    pub wait_share: Option<f64>,
    /// How its speed compares with Python's as written, and with plain tch's, where those are there.
    pub against: Vec<Comparison>,
    /// Seconds of the whole training by seed.
    pub seconds: Option<Spread>,
    /// Share of the test images recognised at the end; the median of the seeds.
    pub accuracy: Option<f64>,
    /// The last loss of training; the median of the seeds.
    pub loss: Option<f64>,
    /// Seconds until the target was reached first, the median of the seeds that reached it all.
    pub seconds_to_target: Option<f64>,
    /// Whether it learns as well as plain tch; nothing where neither was trained as a whole.
    pub kept: Option<bool>,
    /// The marks of whole trainings, each value the median of the seeds.
    pub curve: Vec<Mark>,
    /// How many of its times were taken while something else used the machine, after all repetitions.
    pub disturbed: usize,
}

impl Report {
    /// The report of what was measured.
    pub fn new(setting: Setting, measurements: Vec<Measurements>) -> Self {
        let workloads: Vec<WorkloadReport> = measurements.into_iter().map(WorkloadReport::new).collect();
        let conclusion = verdict::conclusion(&workloads, &setting);
        Self { schema: SCHEMA, setting, workloads, conclusion }
    }

    /// The JSON form, indented.
    ///
    /// # Errors
    /// None that can happen: all of it has a JSON form.
    pub fn to_json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self).map(|json| json + "\n")
    }
}

impl WorkloadReport {
    fn new(measurements: Measurements) -> Self {
        let rows = measurements.measured.iter().map(|one| row(one, &measurements)).collect();
        let goals = verdict::goals(&measurements);
        Self { measurements, rows, goals }
    }

    /// The row of a contender, if it is there.
    pub fn row(&self, contender: Contender) -> Option<&Row> {
        self.rows.iter().find(|row| row.contender == contender)
    }
}

impl Measurements {
    /// What was measured of a contender, if it is there.
    pub fn of(&self, contender: Contender) -> Option<&Measured> {
        self.measured.iter().find(|measured| measured.contender == contender)
    }

    /// What training is to reach: an accuracy, or below a loss.
    pub fn target(&self) -> Target {
        match self.workload {
            Workload::Digits => Target::Accuracy(0.98),
            Workload::Photos => Target::Accuracy(0.9),
            Workload::Text => Target::Loss(2.3),
        }
    }
}

/// What training is to reach.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Target {
    /// Share of the test images, from 0 to 1.
    Accuracy(f64),
    /// Mean training loss.
    Loss(f64),
}

impl Target {
    fn is_reached_by(self, mark: &Mark) -> bool {
        match self {
            Self::Accuracy(least) => mark.accuracy.is_some_and(|accuracy| accuracy >= least),
            Self::Loss(most) => mark.loss.is_some_and(|loss| loss <= most),
        }
    }
}

fn row(one: &Measured, all: &Measurements) -> Row {
    let rates: Vec<f64> = one.turns.iter().map(|turn| turn.rate()).collect();
    let waits = one.turns.iter().map(|turn| turn.wait_seconds / turn.seconds);
    let of_wholes = |value: &dyn Fn(&Mark) -> Option<f64>| {
        let last: Option<Vec<f64>> = one.wholes.iter().map(|whole| value(whole.marks.last()?)).collect();
        last.and_then(|values| median(&values))
    };
    let reached = |marks: &[Mark]| marks.iter().find(|mark| all.target().is_reached_by(mark)).map(|mark| mark.seconds);
    let to_target: Option<Vec<f64>> = one.wholes.iter().map(|whole| reached(&whole.marks)).collect();
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
        kept: all.of(Contender::Tch).and_then(|tch| kept(one, tch)),
        curve: curve(one),
        disturbed: disturbances.filter(|it| it.is_too_much()).count(),
        accuracy,
        loss,
    }
}

/// Whether one learns as well as another, by accuracy where there is one, else by loss.
pub(crate) fn kept(one: &Measured, other: &Measured) -> Option<bool> {
    let last = |of: &Measured, value: fn(&Mark) -> Option<f64>| {
        let values: Option<Vec<f64>> = of.wholes.iter().map(|whole| value(whole.marks.last()?)).collect();
        values.and_then(|values| median(&values))
    };
    let both = |value: fn(&Mark) -> Option<f64>| last(one, value).zip(last(other, value));
    match both(|mark| mark.accuracy) {
        Some((ours, theirs)) => Some((ours - theirs) * 100.0 >= -GUARD_POINTS - 1e-9),
        None if other.wholes.is_empty() || one.wholes.is_empty() => None,
        // A loss that is not finite is not kept.
        None => Some(both(|mark| mark.loss).is_some_and(|(ours, theirs)| ours <= theirs * (1.0 + GUARD_LOSS))),
    }
}

/// The medians of each mark, as far as all seeds got.
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

/// Phases of a few steps as a reader wants them: at most `steps` of them, from the first.
pub fn first_steps(timeline: &[Span], steps: usize) -> &[Span] {
    let begins = timeline.iter().enumerate().filter(|(_, span)| span.phase == FIRST_PHASE).map(|(at, _)| at);
    let end = begins.skip(1).nth(steps.saturating_sub(1)).unwrap_or(timeline.len());
    &timeline[..end]
}

/// The phase with which a step begins.
pub const FIRST_PHASE: &str = "data wait";

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
