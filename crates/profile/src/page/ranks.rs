//! The ranks in a table.

use super::section;
use super::table::{Cell, numbers, table, words};
use super::text::{milliseconds, plural};
use crate::{Phase, RunProfile, StepReport, stragglers};

/// One row per rank. Empty for a run with a single rank.
pub(super) fn ranks(run: &RunProfile) -> String {
    if run.ranks.is_empty() {
        return String::new();
    }
    let slow = stragglers(&run.ranks, 3.0).unwrap_or_default();
    let on_device = run.ranks.iter().all(|report| report.device.is_some());
    let phases = |report: &StepReport, phase: Phase| {
        let device = report.device.as_ref().filter(|_| on_device);
        let found = device.map_or_else(|| report.phase(phase), |device| device.phase(phase));
        found.map(|it| it.median_seconds)
    };
    let on_hosts = run.are_ranks_on_hosts();
    let mut columns = vec![words("Rank")];
    columns.extend(on_hosts.then(|| words("Host")));
    columns.extend([numbers("Steps"), numbers("Median step")]);
    let shown: Vec<Phase> = Phase::ALL
        .into_iter()
        .filter(|&phase| run.ranks.iter().any(|report| phases(report, phase) > Some(0.0)))
        .collect();
    columns.extend(shown.iter().map(|phase| numbers(phase.name())));
    let rows = run.ranks.iter().enumerate().map(|(place, report)| {
        let rank = run.rank_number(place);
        let mut cells = vec![Cell::number(rank.to_string(), rank as f64)];
        let host = run.rank_info.get(place).map_or("", |info| &info.host);
        cells.extend(on_hosts.then(|| Cell::text(host)));
        cells.extend([
            Cell::number(report.steps.to_string(), report.steps as f64),
            Cell::number(milliseconds(report.median_seconds), report.median_seconds),
        ]);
        cells.extend(shown.iter().map(|&phase| {
            let is_slow = slow.iter().any(|straggler| straggler.rank == place && straggler.phase == phase);
            Cell::maybe(phases(report, phase), milliseconds).marked(is_slow)
        }));
        cells
    });
    let count = run.ranks.len() as u64;
    let mut explanation = format!(
        "{}; medians in milliseconds, of the phases on the {}. Red: a higher median than the others.",
        plural(count, "rank"),
        if on_device { "device" } else { "host" },
    );
    if let Some(missing) = run.missing_ranks() {
        explanation += &format!(" Of the {} ranks, these have no report: {missing}.", run.world_size);
    } else if count != run.world_size {
        let missing = run.world_size.saturating_sub(count);
        explanation += &format!(" {missing} of {} are missing, so ranks may have wrong numbers.", run.world_size);
    }
    section("Ranks", &explanation, &table("Ranks", &columns, rows.collect()))
}
