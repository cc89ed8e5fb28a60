//! What the numbers allow to say. A difference counts where the whole interval of the pairs lies on one side; nothing is
//! said of times that were taken while something else used the machine.

use serde::{Deserialize, Serialize};

use crate::report::{Measurements, Setting, WorkloadReport, kept};
use crate::text::{accuracy, list, seconds, times};
use crate::{Contender, Measured, Spread};

/// Fewer pairs than this make no interval.
const LEAST_PAIRS: usize = 3;

/// How many times as fast one contender is as another.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// The other.
    pub with: Contender,
    /// The median, lowest and highest of the pairs' ratios.
    pub ratio: Spread,
    /// How many pairs.
    pub pairs: usize,
    /// How many of them were disturbed, and say nothing.
    pub disturbed: usize,
}

/// What can be said of a ratio and a bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// All pairs reach the bound.
    Met,
    /// None does.
    Missed,
    /// Some do and some do not, or there are too few.
    Undecided,
    /// Something else used the machine.
    Disturbed,
}

/// What came of a goal.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct GoalResult {
    /// Times as fast, at least.
    pub at_least: f64,
    /// How fast it is, by what was compared.
    pub comparison: Comparison,
    /// By whole trainings, or else by turns of steady training.
    pub of_wholes: bool,
    /// What that says.
    pub outcome: Outcome,
}

impl Comparison {
    /// By the turns that both took in the same rounds.
    pub(crate) fn of_turns(one: &Measured, other: &Measured) -> Option<Self> {
        let pairs = one.turns.iter().zip(&other.turns);
        let values = pairs.map(|(ours, theirs)| {
            let disturbed = ours.disturbance.is_too_much() || theirs.disturbance.is_too_much();
            (ours.rate() / theirs.rate(), disturbed)
        });
        Self::of(other.contender, values.collect())
    }

    /// By the times that whole trainings of the same seeds took.
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

    /// What it says of a bound.
    pub fn outcome(&self, at_least: f64) -> Outcome {
        match self {
            _ if self.disturbed > 0 => Outcome::Disturbed,
            _ if self.pairs < LEAST_PAIRS => Outcome::Undecided,
            _ if self.ratio.low >= at_least => Outcome::Met,
            _ if self.ratio.high < at_least => Outcome::Missed,
            _ => Outcome::Undecided,
        }
    }

    /// `2.41x (2.30-2.52)`, or the only one there is.
    pub fn text(&self) -> String {
        let Spread { median, low, high } = self.ratio;
        let bare = |ratio: f64| times(ratio).trim_end_matches('x').to_owned();
        if self.pairs == 1 { times(median) } else { format!("{} ({}-{})", times(median), bare(low), bare(high)) }
    }
}

/// What became of each goal. Whole trainings count where there are enough of them: they hold the first epoch's decoding.
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

/// A headline, then what each workload's numbers say.
pub(crate) fn conclusion(workloads: &[WorkloadReport], setting: &Setting) -> Vec<String> {
    let mut lines = vec![headline(workloads)];
    for workload in workloads {
        lines.extend(of_workload(workload));
    }
    if setting.rounds < LEAST_PAIRS as u32 {
        lines.push(format!("Fewer than {LEAST_PAIRS} rounds: take the numbers as a first look."));
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
        true => "No conclusion: something else used this machine. Measure again when it is quiet.".to_owned(),
        false => {
            "No conclusion: the differences are smaller than their spread, or were measured too few times.".to_owned()
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
            "{name}: {disturbed} of the times were taken while something else used the machine, repetitions included: no \
             conclusion from those."
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
            format!("; left out, because steps were no faster with it here: {}", list(&left_out))
        };
        lines.push(format!("{name}: combined here is {made}{rest}."));
    }
    lines
}

/// What was learned in whole trainings.
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
    let lost = if kept == Some(false) { " combined learns less than plain tch: do not use it like this." } else { "" };
    (!each.is_empty())
        .then(|| format!("{}, trained as a whole: {}.{lost}", report.measurements.workload, each.join(", ")))
}

#[cfg(test)]
#[path = "verdict_tests.rs"]
mod tests;
