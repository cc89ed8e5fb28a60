//! The lines under the table: the accuracy guard, the goals for speed, and the experiment that they were taken from.

use crate::advice::fallen;
use crate::report::GUARD_POINTS;
use crate::text::{percent, seconds, times};
use crate::{Report, Row, Technique};

/// The goals for caching with prefetching.
const WON_BACK_GOAL: f64 = 0.9;
const WAIT_GOAL: f64 = 0.02;

/// The reference experiment, on a GPU: seconds before and after, and times faster.
const REFERENCE: (f64, f64, f64) = (20.03, 11.27, 1.78);

/// The lines, in order; none of them fails a run that missed a goal.
pub fn notes(report: &Report) -> Vec<String> {
    let mut lines = vec![guard(&report.rows)];
    for device in report.devices() {
        let find = |technique| report.rows_on(device).find(|row| row.technique == technique);
        lines.extend(find(Technique::CachePrefetch).and_then(won_back));
        let ours = find(Technique::CachePrefetch).zip(find(Technique::Baseline));
        lines.extend(ours.map(|(row, baseline)| reference(row, baseline)));
    }
    lines
}

fn guard(rows: &[Row]) -> String {
    match fallen(rows) {
        none if none.is_empty() => format!("Guard: every row kept accuracy within {GUARD_POINTS} points of baseline."),
        some => format!("Guard: accuracy fell more than {GUARD_POINTS} points below baseline with {some}."),
    }
}

fn won_back(row: &Row) -> Option<String> {
    let (won, wait) = (row.won_back_fraction?, row.data_wait_fraction);
    let said = |met: bool| if met { "met" } else { "missed" };
    Some(format!(
        "{} on {} won back {} of the time that baseline spent on data (goal: at least {}, {}) and waited for data {} \
         of its time (goal: under {}, {}).",
        row.technique,
        row.device,
        percent(won),
        percent(WON_BACK_GOAL),
        said(won >= WON_BACK_GOAL),
        percent(wait),
        percent(WAIT_GOAL),
        said(wait < WAIT_GOAL),
    ))
}

fn reference(row: &Row, baseline: &Row) -> String {
    let (before, after, faster) = REFERENCE;
    format!(
        "Reference experiment, on a GPU: {before} s down to {after} s, {}. Here, on {}, with {}: {} s down to {} s, \
         {}.",
        times(faster),
        row.device,
        row.technique,
        seconds(baseline.seconds_median),
        seconds(row.seconds_median),
        times(row.speedup),
    )
}
