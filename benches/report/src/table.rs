//! Plain tables for a terminal, at most a hundred columns wide.

use std::fmt::Write;

use crate::notes::notes;
use crate::text::{accuracy, bytes, percent, points, seconds, times, wrap};
use crate::{DeviceKind, Report, Row};

/// The widest line that [`render`] writes.
pub const WIDTH: usize = 100;

/// The table of a report, the lines that belong to it, and the advice last.
pub fn render(report: &Report) -> String {
    let mut out = String::new();
    for device in report.devices() {
        let (place, named) = match device {
            DeviceKind::Cpu => ("cpu", Some(report.setting.machine.cpu.as_str())),
            DeviceKind::Cuda => ("cuda", report.setting.machine.gpu.as_deref()),
        };
        let rows: Vec<&Row> = report.rows_on(device).collect();
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{place}: {}\n\n{}", named.unwrap_or("unknown"), of_rows(&rows));
    }
    out + &paragraphs(notes(report).iter().map(String::as_str)) + "\n" + &paragraphs(report.advice.lines())
}

/// Each line wrapped, those that it runs over onto set in.
fn paragraphs<'a>(lines: impl Iterator<Item = &'a str>) -> String {
    lines.map(|line| wrap(line, WIDTH - 2).replace('\n', "\n  ") + "\n").collect()
}

/// The rows of one device; its memory has a column where it was measured.
fn of_rows(rows: &[&Row]) -> String {
    let with_device = rows.iter().any(|row| row.peak_device_bytes.is_some());
    let mut head = vec!["technique", "seconds (low-high)", "speed-up", "accuracy (change)", "peak RSS"];
    head.extend(with_device.then_some("device"));
    head.extend(["data wait", "kept"]);
    let line = |row: &&Row| {
        let spread = row.spread();
        let mut cells = vec![
            row.technique.to_string(),
            format!("{} ({}-{})", seconds(spread.median), seconds(spread.low), seconds(spread.high)),
            times(row.speedup),
            format!("{} ({})", accuracy(row.accuracy), points(row.accuracy_delta_points)),
            bytes(row.peak_rss_bytes),
        ];
        cells.extend(with_device.then(|| bytes(row.peak_device_bytes)));
        cells.push(percent(row.data_wait_fraction));
        cells.push(
            if row.is_baseline() {
                "-"
            } else if row.kept_accuracy {
                "yes"
            } else {
                "NO"
            }
            .to_owned(),
        );
        cells
    };
    align(&head, &rows.iter().map(line).collect::<Vec<_>>())
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
        for cuda in [false, true] {
            let text = render(&sample::report(cuda));
            assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "too wide:\n{text}");
            let table: Vec<&str> = text.lines().skip_while(|line| !line.starts_with("technique")).collect();
            let end = |line: &str| line.chars().count();
            let rows = table.iter().take_while(|line| !line.is_empty()).map(|line| end(line)).collect::<Vec<_>>();
            assert!(rows.len() > 5 && rows.iter().all(|&row| row == rows[0]), "not aligned:\n{text}");
        }
    }

    #[test]
    fn the_table_carries_the_guard_the_goals_and_the_reference_and_ends_with_the_advice() {
        let report = sample::report(false);
        let text = render(&report);
        for said in ["Guard:", "won back", "20.03 s down to 11.27 s, 1.78x"] {
            assert!(text.contains(said), "no {said:?} in:\n{text}");
        }
        assert!(text.ends_with(&paragraphs(report.advice.lines())));
    }
}
