//! What is said of each workload: on its part of the page, and in the conclusion.

use crate::report::{Setting, WorkloadReport};
use crate::text::{accuracy, list, seconds, times};
use crate::verdict::{GoalResult, LEAST_PAIRS, Outcome, Side};
use crate::{Contender, Workload};

/// What is to be known of a workload's numbers, but for the comparisons.
pub(crate) fn of(report: &WorkloadReport, setting: &Setting) -> Vec<String> {
    let all = &report.measurements;
    let name = all.workload;
    let mut lines = Vec::new();
    lines.extend(disturbed(report));
    for one in &all.measured {
        if let Some(failure) = &one.failure {
            let turns = count(one.turns.len(), "turn");
            lines.push(format!("{name}: {} failed after {turns}: {failure}", one.contender.title()));
        }
    }
    if let Some(row) = report.row(Contender::Combined) {
        lines.extend(learned(report, row.kept));
        let parts = list(all.parts.iter());
        let made = if parts.is_empty() { "plain tch".to_owned() } else { parts };
        let rest = match all.left_out.is_empty() {
            true if setting.size == "quick" => "; --quick has no time to try which of them pay here".to_owned(),
            true => String::new(),
            false => format!("; left out, because a short trial showed no gain here: {}", list(&all.left_out)),
        };
        lines.push(format!("{name}: Overdrive uses {made}{rest}."));
    }
    lines
}

/// How many timings were disturbed, and what that means for the numbers.
fn disturbed(report: &WorkloadReport) -> Option<String> {
    let name = report.measurements.workload;
    let disturbed: usize = report.rows.iter().map(|row| row.disturbed).sum();
    let all: usize = report.measurements.measured.iter().map(|one| one.turns.len() + one.wholes.len()).sum();
    let were = if disturbed == 1 { "was" } else { "were" };
    let how_many = match disturbed {
        0 => return None,
        _ if disturbed == all => "every timing was".to_owned(),
        _ => format!("{disturbed} of {} {were}", count(all, "timing")),
    };
    let by = "disturbed by other use of the machine";
    Some(match says_nothing(report) {
        true => format!("{name}: {how_many} {by}; its numbers are no basis for a comparison."),
        false => format!("{name}: {how_many} {by}: nothing is concluded from those."),
    })
}

/// Whether all comparisons of the goals are disturbed.
pub(crate) fn says_nothing(report: &WorkloadReport) -> bool {
    !report.goals.is_empty() && report.goals.iter().all(|goal| goal.comparison.disturbed > 0)
}

/// The comparisons of the goals: a sentence for those by whole trainings, and one for those by turns. None if all are
/// disturbed, because [`of`] says so.
pub(crate) fn compared(report: &WorkloadReport) -> Vec<String> {
    let name = report.measurements.workload;
    let sentence = |of_wholes: bool| {
        let goals = report.goals.iter().filter(|goal| goal.of_wholes == of_wholes);
        let said: Vec<String> = goals.map(GoalResult::text).collect();
        (!said.is_empty()).then(|| format!("{name}, {}: Overdrive is {}.", basis(of_wholes), said.join("; ")))
    };
    if says_nothing(report) { Vec::new() } else { [true, false].into_iter().filter_map(sentence).collect() }
}

/// What is compared, in words.
pub(crate) const fn basis(of_wholes: bool) -> &'static str {
    if of_wholes { "whole trainings" } else { "steady training (turns of a few seconds, without the start)" }
}

impl GoalResult {
    /// `2.20x (2.10-2.30) as fast as PyTorch as written (faster; goal 2.20x: undecided)`.
    fn text(&self) -> String {
        let (it, with) = (self.comparison, self.comparison.with.title());
        if self.outcome == Outcome::Disturbed {
            return format!("not comparable with {with}, because timings were disturbed");
        }
        format!("{} as fast as {with} ({}; {})", it.text(), it.side(), self.goal())
    }

    /// The goal and its result, to be read behind the comparison's side.
    pub(crate) fn goal(&self) -> String {
        let goal = times(self.at_least);
        match (self.outcome, self.comparison.side()) {
            (Outcome::Undecided, Side::Undecided) => format!("as is the goal of {goal}"),
            (outcome, _) => format!("goal {goal}: {outcome}"),
        }
    }
}

/// `1 turn`, `2 turns`.
fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

/// Accuracy or loss of the whole trainings.
fn learned(report: &WorkloadReport, kept: Option<bool>) -> Option<String> {
    let said = |contender: Contender| {
        let row = report.row(contender)?;
        // By what decides whether it was kept: the test photographs are too few for an accuracy.
        let decides = report.measurements.workload == Workload::Digits;
        let result = match (row.accuracy.filter(|_| decides), row.loss) {
            (Some(share), _) => accuracy(share),
            (None, Some(loss)) => format!("a loss of {loss:.3}"),
            (None, None) => return None,
        };
        let wholes = &report.measurements.of(contender)?.wholes;
        let is_disturbed = wholes.iter().any(|whole| whole.disturbance.is_too_much());
        let time = if is_disturbed { "a disturbed time".to_owned() } else { seconds(row.seconds?.median) + " s" };
        Some(format!("{} {time} to {result}", contender.title()))
    };
    let columns = [Contender::Combined, Contender::Pytorch, Contender::PytorchTuned, Contender::Tch];
    let each: Vec<String> = columns.into_iter().filter_map(said).collect();
    let seeds = report.measurements.of(Contender::Combined).map_or(0, |it| it.wholes.len());
    let lost = match kept {
        Some(false) if seeds < LEAST_PAIRS => {
            " Overdrive learned less than plain tch with this seed; --full tries three."
        }
        Some(false) => " Overdrive learned less than plain tch: do not use it like this.",
        _ => "",
    };
    (!each.is_empty())
        .then(|| format!("{}, trained as a whole: {}.{lost}", report.measurements.workload, each.join(", ")))
}
