//! The conclusions. A difference counts only if the whole interval of the pairs lies on one side of the bound. Nothing
//! is concluded from disturbed timings.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::report::{Measurements, Setting, WorkloadReport, kept};
use crate::text::{list, times};
use crate::{Contender, DeviceKind, Measured, Spread, remarks};

/// With fewer pairs, everything is undecided.
pub(crate) const LEAST_PAIRS: usize = 3;

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
    /// Some pairs do, there are too few pairs, or one of both failed later.
    Undecided,
    /// A timing was disturbed.
    Disturbed,
}

/// Which of two is faster, whatever the goal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The first one in every pair.
    Faster,
    /// The other one in every pair.
    Slower,
    /// Now one, now the other, or there are too few pairs.
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

    /// Which of both is faster.
    pub fn side(&self) -> Side {
        match self {
            _ if self.disturbed > 0 => Side::Disturbed,
            _ if self.pairs < LEAST_PAIRS => Side::Undecided,
            _ => Side::of(self.ratio),
        }
    }

    /// `2.41x (2.30-2.52)`; with two pairs, which have no median, `2.30x and 2.52x`; with one, `2.41x`.
    pub fn text(&self) -> String {
        let Spread { median, low, high } = self.ratio;
        let bare = |ratio: f64| times(ratio).trim_end_matches('x').to_owned();
        match self.pairs {
            1 => times(median),
            2 => format!("{} and {}", times(low), times(high)),
            _ => format!("{} ({}-{})", times(median), bare(low), bare(high)),
        }
    }

    /// The ratio that a headline may claim: the median of enough pairs, else the one that is nearest to 1.
    fn claim(&self) -> f64 {
        match Side::of(self.ratio) {
            Side::Faster if self.pairs < LEAST_PAIRS => self.ratio.low,
            Side::Slower if self.pairs < LEAST_PAIRS => self.ratio.high,
            _ => self.ratio.median,
        }
    }
}

impl Side {
    fn of(ratio: Spread) -> Self {
        match ratio {
            _ if ratio.low > 1.0 => Self::Faster,
            _ if ratio.high < 1.0 => Self::Slower,
            _ => Self::Undecided,
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Met => "met",
            Self::Missed => "missed",
            Self::Undecided => "undecided",
            Self::Disturbed => "disturbed",
        })
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Faster => "faster",
            Self::Slower => "slower",
            Self::Undecided => "undecided",
            Self::Disturbed => "disturbed",
        })
    }
}

/// The results of the goals, on a machine with or without those two cores. With enough whole trainings, those are
/// compared, because they include the first epoch's decoding.
pub(crate) fn goals(all: &Measurements, setting: &Setting) -> Vec<GoalResult> {
    let Some(ours) = all.of(Contender::Combined) else { return Vec::new() };
    let goal = |goal: crate::workload::Goal| {
        let theirs = all.of(goal.against)?;
        let of_wholes = Comparison::of_wholes(ours, theirs).filter(|it| it.pairs >= LEAST_PAIRS);
        let is_of_wholes = of_wholes.is_some();
        let comparison = of_wholes.or_else(|| Comparison::of_turns(ours, theirs))?;
        let others = [all.of(Contender::Tch), Some(theirs)];
        let lost = others.into_iter().flatten().any(|other| kept(ours, other, all.workload) == Some(false));
        let outcome = match lost {
            _ if ours.failure.is_some() || theirs.failure.is_some() => Outcome::Undecided,
            false => comparison.outcome(goal.at_least),
            // One seed alone may be an unlucky one.
            true if ours.wholes.len() < LEAST_PAIRS => Outcome::Undecided,
            true => Outcome::Missed,
        };
        Some(GoalResult { at_least: goal.at_least, comparison, of_wholes: is_of_wholes, outcome })
    };
    let two_cores = setting.device == DeviceKind::Cpu && setting.machine.cores == 2;
    all.workload.goals(two_cores).into_iter().filter_map(goal).collect()
}

/// The headline, then sentences about each workload.
pub(crate) fn conclusion(workloads: &[WorkloadReport], setting: &Setting) -> Vec<String> {
    let mut lines = vec![headline(workloads)];
    for workload in workloads {
        lines.extend(remarks::compared(workload).into_iter().chain(remarks::of(workload, setting)));
    }
    lines.extend(setting.failures.iter().map(|failure| format!("{failure}. Nothing was measured of it.")));
    if setting.rounds < LEAST_PAIRS as u32 {
        lines.push(format!("With fewer than {LEAST_PAIRS} rounds, the numbers are a first look."));
    }
    lines
}

fn headline(workloads: &[WorkloadReport]) -> String {
    let mut beside = String::new();
    for (with, name) in
        [(Contender::Pytorch, "Python's PyTorch as most people write it"), (Contender::Tch, "plain tch")]
    {
        for is_first_look in [false, true] {
            if let Some(said) = Standing::against(workloads, with, is_first_look).sentence(name) {
                return format!(
                    "{}{said}{beside}.",
                    if is_first_look { "A first look, with too few rounds to decide: " } else { "" }
                );
            }
        }
        let standing = Standing::against(workloads, with, false);
        if standing.was_measured() {
            beside = format!("; beside {name}, {}", standing.open().join("; "));
        }
    }
    let standing = Standing::against(workloads, Contender::Tch, false);
    if !standing.missing.is_empty() {
        return format!("No conclusion: {}.", standing.open().join("; "));
    }
    match workloads.iter().any(|workload| workload.rows.iter().any(|row| row.disturbed > 0)) {
        true => "No conclusion: other programs used this machine. Measure again when it is idle.".to_owned(),
        false => {
            "No conclusion: the differences are smaller than their spread, or there are too few rounds.".to_owned()
        }
    }
}

/// How the combined contender stands against another one on each workload, by the comparisons of the goals. All
/// workloads are named, so that a gain on one does not hide another.
#[derive(Default)]
struct Standing {
    /// With the median, like those that are slower.
    faster: Vec<String>,
    slower: Vec<String>,
    /// Where it learned less than plain tch, so that its speed is worth nothing.
    learned_less: Vec<String>,
    undecided: Vec<String>,
    disturbed: Vec<String>,
    /// Where one of both could not run or failed, with the reason.
    missing: Vec<String>,
}

impl Standing {
    /// From enough pairs, or for a first look from fewer; the others are undecided. Disturbed pairs say nothing.
    fn against(workloads: &[WorkloadReport], with: Contender, is_first_look: bool) -> Self {
        let mut standing = Self::default();
        for workload in workloads {
            let name = workload.measurements.workload;
            if let Some(reason) = missing(&workload.measurements, with) {
                standing.missing.push(format!("{name} is missing ({reason})"));
                continue;
            }
            let Some(row) = workload.row(Contender::Combined) else { continue };
            let Some(goal) = workload.goals.iter().find(|goal| goal.comparison.with == with) else { continue };
            let it = goal.comparison;
            let text = format!("{name} {}", times(it.claim()));
            match Side::of(it.ratio) {
                _ if it.disturbed > 0 => standing.disturbed.push(name.to_string()),
                _ if (it.pairs < LEAST_PAIRS) != is_first_look => standing.undecided.push(name.to_string()),
                _ if row.kept == Some(false) => standing.learned_less.push(name.to_string()),
                Side::Faster => standing.faster.push(text),
                Side::Slower => standing.slower.push(text),
                Side::Undecided | Side::Disturbed => standing.undecided.push(name.to_string()),
            }
        }
        standing
    }

    fn was_measured(&self) -> bool {
        !self.undecided.is_empty() || !self.disturbed.is_empty()
    }

    /// A sentence without its full stop; None if there is nothing to say.
    fn sentence(&self, name: &str) -> Option<String> {
        let speed = match (self.faster.is_empty(), self.slower.is_empty()) {
            (true, true) if self.learned_less.is_empty() => return None,
            (true, true) => None,
            (false, true) => Some(format!("Overdrive trains {} as fast as {name}", list(&self.faster))),
            (true, false) => Some(format!("Overdrive is slower here: {} as fast as {name}", list(&self.slower))),
            (false, false) => {
                Some(format!("Overdrive trains {} as fast as {name}, but {}", list(&self.faster), list(&self.slower)))
            }
        };
        let it = if speed.is_some() { "it" } else { "It" };
        let less = (!self.learned_less.is_empty())
            .then(|| format!("{it} learned less than plain tch on {}", list(&self.learned_less)));
        Some(speed.into_iter().chain(less).chain(self.open()).collect::<Vec<_>>().join("; "))
    }

    /// The workloads of which nothing is said, each with the reason.
    fn open(&self) -> Vec<String> {
        let are = |workloads: &[String], what: &str| {
            let verb = if workloads.len() == 1 { "is" } else { "are" };
            (!workloads.is_empty()).then(|| format!("{} {verb} {what}", list(workloads)))
        };
        let decided = [are(&self.undecided, "undecided"), are(&self.disturbed, "disturbed")];
        decided.into_iter().flatten().chain(self.missing.iter().cloned()).collect()
    }
}

/// Why the combined contender cannot be compared with another one: one of both could not run, or failed after some
/// turns. None if one of both was not asked for.
fn missing(all: &Measurements, with: Contender) -> Option<String> {
    let is_absent = |who: Contender| all.absent.iter().any(|(absent, _)| *absent == who);
    let both = [Contender::Combined, with];
    if !both.into_iter().all(|who| is_absent(who) || all.of(who).is_some()) {
        return None;
    }
    both.into_iter().find_map(|who| match all.of(who) {
        Some(one) => one.failure.as_ref().map(|_| format!("{} failed", who.title())),
        None => Some(format!("{} is absent", who.title())),
    })
}

#[cfg(test)]
#[path = "verdict_tests.rs"]
mod tests;
