//! Plain tables for a terminal, at most 110 columns wide.

use std::fmt::Write;

use crate::report::WorkloadReport;
use crate::text::{accuracy, bytes, percent, rate, seconds, wrap};
use crate::verdict::Comparison;
use crate::{Contender, Report, Row, Spread};

/// The widest line that [`render`] writes.
pub const WIDTH: usize = 110;

/// One table per workload, then the conclusion.
pub fn render(report: &Report) -> String {
    let mut out = String::new();
    for workload in &report.workloads {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{}\n\n{}", title(workload), of_rows(workload));
        let absent = workload.measurements.absent.iter();
        out += &paragraphs(absent.map(|(contender, reason)| format!("{} is absent: {reason}", contender.title())));
        out += "\n";
    }
    out + &paragraphs(report.conclusion.iter().cloned())
}

fn title(workload: &WorkloadReport) -> String {
    let all = &workload.measurements;
    let description = all.workload.description();
    format!("{}: {}", all.workload, description.trim_end_matches('.'))
}

/// Each line wrapped, those that it runs over onto set in.
fn paragraphs(lines: impl Iterator<Item = String>) -> String {
    lines.map(|line| wrap(&line, WIDTH - 2).replace('\n', "\n  ") + "\n").collect()
}

/// The header and cells of a workload's table, without columns of what was not measured. A wide table also has the
/// spreads of speeds and times, the time to the target, and both kinds of memory on a GPU box.
pub(crate) fn cells(workload: &WorkloadReport, wide: bool) -> (Vec<String>, Vec<Vec<String>>) {
    let all = &workload.measurements;
    let has = |value: &dyn Fn(&Row) -> bool| workload.rows.iter().any(value);
    let spread = |spread: Option<Spread>, text: &dyn Fn(f64) -> String| match spread {
        None => "-".to_owned(),
        Some(it) if wide && it.low < it.high => format!("{} ({}-{})", text(it.median), text(it.low), text(it.high)),
        Some(it) => text(it.median),
    };
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let against =
        |with: Contender| move |row: &Row| or_dash(row.against.iter().find(|it| it.with == with).map(Comparison::text));
    let host = |row: &Row| all.of(row.contender).and_then(|it| it.peak_bytes);
    let device = |row: &Row| all.of(row.contender).and_then(|it| it.peak_device_bytes);
    let on_device = has(&|row| device(row).is_some());
    let accuracy_of = |row: &Row| or_dash(row.accuracy.map(accuracy));
    let loss_of = |row: &Row| or_dash(row.loss.map(|loss| format!("{loss:.3}")));
    let (of_pytorch, of_tch) = (against(Contender::Pytorch), against(Contender::Tch));
    type Cell<'a> = &'a dyn Fn(&Row) -> String;
    let columns: [(bool, &str, Cell<'_>); 10] = [
        (true, &format!("{}/s", all.workload.samples()), &|row| spread(row.rate, &rate)),
        (all.of(Contender::Pytorch).is_some(), "of PyTorch", &of_pytorch),
        (true, "of tch", &of_tch),
        (true, "waits", &|row| or_dash(row.wait_share.map(percent))),
        (wide || !on_device, if wide { "peak memory" } else { "memory" }, &|row| bytes(host(row))),
        (on_device, "on GPU", &|row| bytes(device(row))),
        (has(&|row| row.seconds.is_some()), "time, s", &|row| spread(row.seconds, &seconds)),
        (wide && has(&|row| row.seconds_to_target.is_some()), &format!("s to {}", all.target()), &|row| {
            or_dash(row.seconds_to_target.map(seconds))
        }),
        (has(&|row| row.accuracy.is_some()), "accuracy", &accuracy_of),
        (has(&|row| row.loss.is_some() && row.accuracy.is_none()), "loss", &loss_of),
    ];
    let shown = || columns.iter().filter(|(is_shown, _, _)| *is_shown);
    let head = shown().map(|(_, head, _)| (*head).to_owned()).collect();
    (head, workload.rows.iter().map(|row| shown().map(|(_, _, cell)| cell(row)).collect()).collect())
}

fn of_rows(workload: &WorkloadReport) -> String {
    let (head, cells) = cells(workload, false);
    let head: Vec<&str> = std::iter::once("").chain(head.iter().map(String::as_str)).collect();
    let named = workload.rows.iter().zip(cells).map(|(row, cells)| {
        let disturbed = if row.disturbed > 0 { "*" } else { "" };
        [vec![format!("{}{disturbed}", row.contender.title())], cells].concat()
    });
    let mut out = align(&head, &named.collect::<Vec<_>>());
    if workload.rows.iter().any(|row| row.disturbed > 0) {
        out += "* disturbed by other use of the machine\n";
    }
    out
}

/// Columns as wide as their widest cell: the first to the left, the others to the right, under a rule.
pub(crate) fn align(head: &[&str], rows: &[Vec<String>]) -> String {
    let width = |text: &str| text.chars().count();
    let widths: Vec<usize> = head
        .iter()
        .enumerate()
        .map(|(i, title)| {
            rows.iter().filter_map(|row| row.get(i)).map(|cell| width(cell)).fold(width(title), usize::max)
        })
        .collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let padded = cells.zip(&widths).enumerate().map(|(i, (cell, &width))| match i {
            0 => format!("{cell:<width$}"),
            _ => format!("{cell:>width$}"),
        });
        padded.collect::<Vec<String>>().join("  ").trim_end().to_owned() + "\n"
    };
    let rule = "-".repeat(widths.iter().sum::<usize>() + 2 * widths.len().saturating_sub(1)) + "\n";
    let mut out = line(&mut head.iter().copied()) + &rule;
    out.extend(rows.iter().map(|row| line(&mut row.iter().map(String::as_str))));
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;

    #[test]
    fn columns_line_up_and_no_line_is_too_wide() {
        for report in [sample::report(), sample::quick()] {
            let text = render(&report);
            assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "too wide:\n{text}");
        }
    }

    #[test]
    fn the_table_names_who_is_absent_and_ends_with_the_conclusion() {
        let report = sample::quick();
        let text = render(&report);
        assert!(text.contains("PyTorch as written is absent: no torch in python3"), "{text}");
        assert!(!text.contains("of PyTorch") && text.contains("of tch"), "{text}");
        assert!(text.ends_with(&paragraphs(report.conclusion.iter().cloned())));
    }
}
