//! The conclusions. A difference counts only if the whole interval of the pairs lies on one side of the bound. Nothing is
//! concluded from disturbed timings.

use serde::{Deserialize, Serialize};

use crate::report::{Measurements, Setting, WorkloadReport, kept};
use crate::text::{accuracy, list, seconds, times};
use crate::{Contender, Measured, Spread};

/// With fewer pairs, everything is undecided.
const LEAST_PAIRS: usize = 3;

/// The speed of one contender relative to another one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// The other contender.
    pub with: Contender,
    /// The median, lowest and highest of the pairs' ratios.
    pub ratio: Spread,
    /// The number of pairs.
    pub pairs: usize,
    /// The number of disturbed pairs.
    pub disturbed: usize,
}

/// Whether a ratio reaches a bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Every pair does.
    Met,
    /// No pair does.
    Missed,
    /// Some pairs do, or there are too few pairs.
    Undecided,
    /// A timing was disturbed.
    Disturbed,
}

/// The result of a goal.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct GoalResult {
    /// The least ratio of speeds.
    pub at_least: f64,
    /// The measured ratio.
    pub comparison: Comparison,
    /// Whether the ratio compares whole trainings; otherwise it compares turns.
    pub of_wholes: bool,
    /// Whether the goal is met.
    pub outcome: Outcome,
}

impl Comparison {
    /// Compares the turns of the same rounds.
    pub(crate) fn of_turns(one: &Measured, other: &Measured) -> Option<Self> {
        let pairs = one.turns.iter().zip(&other.turns);
        let values = pairs.map(|(ours, theirs)| {
            let disturbed = ours.disturbance.is_too_much() || theirs.disturbance.is_too_much();
            (ours.rate() / theirs.rate(), disturbed)
        });
        Self::of(other.contender, values.collect())
    }

    /// Compares the times of whole trainings with the same seeds.
    fn of_wholes(one: &Measured, other: &Measured) -> Option<Self> {
        let pairs = one.wholes.iter().zip(&other.wholes);
        let values = pairs.map(|(ours, theirs)| {
            let disturbed = ours.disturbance.is_too_much() || theirs.disturbance.is_too_much();
            (theirs.seconds / ours.seconds, disturbed)
        });
        Self::of(other.contender, values.collect())
    }

    fn of(with: Contender, values: Vec<(f64, bool)>) -> Option<Self> {
        let disturbed = values.iter().filter(|(_, disturbed)| *disturbed).count();
        let ratio = Spread::of(&values.iter().map(|(ratio, _)| *ratio).collect::<Vec<_>>())?;
        Some(Self { with, ratio, pairs: values.len(), disturbed })
    }

    /// Whether it reaches a bound.
    pub fn outcome(&self, at_least: f64) -> Outcome {
        match self {
            _ if self.disturbed > 0 => Outcome::Disturbed,
            _ if self.pairs < LEAST_PAIRS => Outcome::Undecided,
            _ if self.ratio.low >= at_least => Outcome::Met,
            _ if self.ratio.high < at_least => Outcome::Missed,
            _ => Outcome::Undecided,
        }
    }

    /// `2.41x (2.30-2.52)`; with a single pair, `2.41x`.
    pub fn text(&self) -> String {
        let Spread { median, low, high } = self.ratio;
        let bare = |ratio: f64| times(ratio).trim_end_matches('x').to_owned();
        if self.pairs == 1 { times(median) } else { format!("{} ({}-{})", times(median), bare(low), bare(high)) }
    }
}

/// The results of the goals. With enough whole trainings, those are compared, because they include the first epoch's decoding.
pub(crate) fn goals(all: &Measurements) -> Vec<GoalResult> {
    let Some(ours) = all.of(Contender::Combined) else { return Vec::new() };
    let goal = |goal: crate::workload::Goal| {
        let theirs = all.of(goal.against)?;
        let of_wholes = Comparison::of_wholes(ours, theirs).filter(|it| it.pairs >= LEAST_PAIRS);
        let is_of_wholes = of_wholes.is_some();
        let comparison = of_wholes.or_else(|| Comparison::of_turns(ours, theirs))?;
        let lost = all.of(Contender::Tch).and_then(|tch| kept(ours, tch)) == Some(false);
        let outcome = if lost { Outcome::Missed } else { comparison.outcome(goal.at_least) };
        Some(GoalResult { at_least: goal.at_least, comparison, of_wholes: is_of_wholes, outcome })
    };
    all.workload.goals().into_iter().filter_map(goal).collect()
}

/// The headline, then sentences about each workload.
pub(crate) fn conclusion(workloads: &[WorkloadReport], setting: &Setting) -> Vec<String> {
    let mut lines = vec![headline(workloads)];
    for workload in workloads {
        lines.extend(of_workload(workload));
    }
    if setting.rounds < LEAST_PAIRS as u32 {
        lines.push(format!("With fewer than {LEAST_PAIRS} rounds, the numbers are a first look."));
    }
    lines
}

fn headline(workloads: &[WorkloadReport]) -> String {
    let clear = |workload: &WorkloadReport, with: Contender| {
        let against = &workload.row(Contender::Combined)?.against;
        let comparison = against.iter().find(|it| it.with == with).copied()?;
        (comparison.outcome(1.0) == Outcome::Met).then_some((workload.measurements.workload, comparison))
    };
    for (with, name) in
        [(Contender::Pytorch, "Python's PyTorch as most people write it"), (Contender::Tch, "plain tch")]
    {
        let faster: Vec<_> = workloads.iter().filter_map(|workload| clear(workload, with)).collect();
        if !faster.is_empty() {
            let each = faster.iter().map(|(workload, it)| format!("{workload} {}", times(it.ratio.median)));
            return format!("Overdrive trains {} as fast as {name}.", list(each));
        }
    }
    let disturbed = |workload: &WorkloadReport| workload.rows.iter().any(|row| row.disturbed > 0);
    let first_look = |workload: &WorkloadReport| {
        let against = &workload.row(Contender::Combined)?.against;
        let comparison = against.iter().find(|it| it.with == Contender::Pytorch)?;
        let is_faster = comparison.pairs < LEAST_PAIRS && comparison.disturbed == 0 && comparison.ratio.low > 1.0;
        is_faster.then(|| format!("{} {}", workload.measurements.workload, times(comparison.ratio.median)))
    };
    let looks: Vec<String> = workloads.iter().filter_map(first_look).collect();
    if !looks.is_empty() {
        return format!(
            "A first look: Overdrive trains {} as fast as Python's PyTorch as most people write it.",
            list(looks)
        );
    }
    match workloads.iter().any(disturbed) {
        true => "No conclusion: other programs used this machine. Measure again when it is idle.".to_owned(),
        false => {
            "No conclusion: the differences are smaller than their spread, or there are too few rounds.".to_owned()
        }
    }
}

fn of_workload(report: &WorkloadReport) -> Vec<String> {
    let all = &report.measurements;
    let name = all.workload;
    let mut lines = Vec::new();
    let disturbed: usize = report.rows.iter().map(|row| row.disturbed).sum();
    if disturbed > 0 {
        lines.push(format!(
            "{name}: {disturbed} timings were disturbed by other use of the machine, even after repetitions: nothing is \
             concluded from those."
        ));
    }
    if let Some(row) = report.row(Contender::Combined) {
        let against = report.goals.iter().map(|goal| {
            let outcome = match goal.outcome {
                Outcome::Met => "met",
                Outcome::Missed => "missed",
                Outcome::Undecided => "undecided",
                Outcome::Disturbed => "disturbed",
            };
            let (comparison, by) = (goal.comparison, if goal.of_wholes { "whole trainings" } else { "steady steps" });
            format!(
                "{} the speed of {} by {by}, goal {} {outcome}",
                comparison.text(),
                comparison.with,
                times(goal.at_least)
            )
        });
        lines.push(format!("{name}: combined has {}.", against.collect::<Vec<_>>().join("; ")));
        lines.extend(learned(report, row.kept));
    }
    let parts = list(all.parts.iter());
    let left_out: Vec<_> = all.measured.iter().map(|one| one.contender).filter(|it| it.is_technique()).collect();
    let left_out: Vec<_> =
        left_out.into_iter().filter(|it| !all.parts.contains(it) && *it != Contender::Accumulate).collect();
    if all.of(Contender::Combined).is_some() {
        let made = if parts.is_empty() { "plain tch".to_owned() } else { parts };
        let rest = if left_out.is_empty() {
            String::new()
        } else {
            format!("; left out, because they did not make steps faster here: {}", list(&left_out))
        };
        lines.push(format!("{name}: combined uses {made}{rest}."));
    }
    lines
}

/// Accuracy or loss of the whole trainings.
fn learned(report: &WorkloadReport, kept: Option<bool>) -> Option<String> {
    let said = |contender: Contender| {
        let row = report.row(contender)?;
        let result = match (row.accuracy, row.loss) {
            (Some(share), _) => accuracy(share),
            (None, Some(loss)) => format!("a loss of {loss:.3}"),
            (None, None) => return None,
        };
        Some(format!("{contender} {} s to {result}", seconds(row.seconds?.median)))
    };
    let columns = [Contender::Combined, Contender::Pytorch, Contender::PytorchTuned, Contender::Tch];
    let each: Vec<String> = columns.into_iter().filter_map(said).collect();
    let lost = if kept == Some(false) { " combined learned less than plain tch: do not use it like this." } else { "" };
    (!each.is_empty())
        .then(|| format!("{}, trained as a whole: {}.{lost}", report.measurements.workload, each.join(", ")))
}

#[cfg(test)]
#[path = "verdict_tests.rs"]
mod tests;
