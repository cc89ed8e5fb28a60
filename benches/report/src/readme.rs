//! README's table of the technique benchmark, made of a record.

use crate::report::Target;
use crate::text::{accuracy, list, rate, seconds, wrap};
use crate::{Contender, Report, Row, WorkloadReport};

/// The marks around the table in README.md.
const MARKS: [&str; 2] = ["<!-- bench-table -->", "<!-- /bench-table -->"];
/// Ours is first, so that a phone shows it.
const COLUMNS: [Contender; 4] = [Contender::Combined, Contender::Pytorch, Contender::PytorchTuned, Contender::Tch];
const WIDTH: usize = 120;

/// `readme` with the table of this report between its marks; `record` is the report's path from README.md. None if the
/// marks are missing.
pub fn with_table(readme: &str, report: &Report, record: &str) -> Option<String> {
    let (before, rest) = readme.split_once(MARKS[0])?;
    let (_, after) = rest.split_once(MARKS[1])?;
    Some(format!("{before}{}\n{}\n{}{after}", MARKS[0], table(report, record), MARKS[1]))
}

/// The path of the record that README's table was made of.
pub fn record_of(readme: &str) -> Option<&str> {
    let (_, rest) = readme.split_once(MARKS[0])?;
    let (block, _) = rest.split_once(MARKS[1])?;
    let (_, link) = block.split_once("[the record](")?;
    Some(link.split_once(')')?.0)
}

fn table(report: &Report, record: &str) -> String {
    let titles = COLUMNS.map(|it| if it == Contender::Combined { format!("**{}**", it.title()) } else { it.title() });
    let head = format!("| | {} |\n|---|---|---|---|---|\n", titles.join(" | "));
    let line = |workload: &WorkloadReport, name: String, cell: &dyn Fn(&Row) -> String| {
        let cells = COLUMNS.map(|contender| match workload.row(contender) {
            Some(row) if contender == Contender::Combined => format!("**{}**", cell(row)),
            Some(row) => cell(row),
            None => "-".to_owned(),
        });
        format!("| {name} | {} |\n", cells.join(" | "))
    };
    let steady = "Steady speed in turns of a few seconds, the start not counted, relative to Python's PyTorch as most \
                  people write it. The table after this one has whole trainings.";
    let mut text = wrap(steady, WIDTH) + "\n\n";
    text += &head;
    for workload in &report.workloads {
        let it = workload.measurements.workload;
        let name = format!("**{it}**: {}", lower(&it.description()));
        text += &line(workload, name, &|row| speed(row, it.samples()));
    }
    let is_whole = |workload: &&WorkloadReport| workload.rows.iter().any(|row| row.seconds.is_some());
    let wholes: Vec<_> = report.workloads.iter().filter(is_whole).collect();
    if !wholes.is_empty() {
        text += &format!("\n{}\n\n", wrap(&whole_head(report), WIDTH));
        text += &head;
        for workload in wholes {
            let target = workload.measurements.target();
            let disturbed = |row: &Row| is_disturbed(workload, row.contender);
            text += &line(workload, format!("**{}**", workload.measurements.workload), &|row| {
                whole(row, target, disturbed(row))
            });
        }
    }
    text + "\n" + &wrap(&said(report, record), WIDTH)
}

/// The speed relative to PyTorch as written, or its own rate.
fn speed(row: &Row, samples: &str) -> String {
    if row.contender == Contender::Pytorch {
        return row.rate.map_or("-".to_owned(), |it| format!("1 ({} {samples}/s)", rate(it.median)));
    }
    let comparison = row.against.iter().find(|it| it.with == Contender::Pytorch);
    comparison.map_or("-".to_owned(), |it| {
        let note = if it.disturbed > 0 { ", disturbed" } else { "" };
        format!("{}{note}", it.text())
    })
}

/// Whether something else used the machine during a whole training.
fn is_disturbed(workload: &WorkloadReport, contender: Contender) -> bool {
    let wholes = workload.measurements.of(contender).map_or(&[][..], |it| &it.wholes);
    wholes.iter().any(|whole| whole.disturbance.is_too_much())
}

/// The time of a whole training, what it reached, and when it had reached the target.
fn whole(row: &Row, target: Target, is_disturbed: bool) -> String {
    let Some(time) = row.seconds else { return "-".to_owned() };
    let reached = match (target, row.accuracy, row.loss) {
        (Target::Accuracy(_), Some(share), _) => format!(" to {}", accuracy(share)),
        (_, _, Some(loss)) => format!(" to a loss of {loss:.2}"),
        _ => String::new(),
    };
    let to_target = row.seconds_to_target.map(|it| format!("; {target} after {} s", seconds(it))).unwrap_or_default();
    let note = if is_disturbed { "; disturbed" } else { "" };
    format!("{} s ({}-{}{note}){reached}{to_target}", seconds(time.median), seconds(time.low), seconds(time.high))
}

fn whole_head(report: &Report) -> String {
    let seeds = report.setting.seeds.len();
    let of =
        if seeds > 1 { format!("the median of {seeds} seeds, the lowest and the highest") } else { "once".to_owned() };
    let weights = match report.setting.same_initial_weights {
        true => "All begin with the same weights: PyTorch's for the seed.",
        false => "Overdrive and tch begin with tch's initial weights, PyTorch with its own.",
    };
    format!(
        "Trained as a whole, from opening the data to the last step: {of}. When it reached the target is read off between \
         the ends of epochs, for text between twentieths of the run; no time is given where a seed missed it. {weights}"
    )
}

/// How it was measured, and what it says beside tuned Python.
fn said(report: &Report, record: &str) -> String {
    let setting = &report.setting;
    let beside = |workload: &WorkloadReport| {
        let goal = workload.goals.iter().find(|goal| goal.comparison.with == Contender::PytorchTuned)?;
        let (it, by) = (goal.comparison, if goal.of_wholes { "whole trainings" } else { "steady steps" });
        Some(format!("{} {} by {by} ({})", workload.measurements.workload, it.text(), it.side()))
    };
    let beside: Vec<_> = report.workloads.iter().filter_map(beside).collect();
    let parts = |workload: &WorkloadReport| {
        let parts = list(workload.measurements.parts.iter());
        format!("{} {}", workload.measurements.workload, if parts.is_empty() { "nothing" } else { &parts })
    };
    let parts: Vec<_> = report.workloads.iter().map(parts).collect();
    let machine = match &setting.machine.gpu {
        Some(gpu) => gpu.clone(),
        None => format!("{} cores of an {}, no GPU", setting.machine.cores, setting.machine.cpu),
    };
    let libtorch = setting.versions.get("libtorch").map_or("?", String::as_str);
    let day = setting.measured_at.split_whitespace().next().unwrap_or_default();
    let beside = match beside.is_empty() {
        true => String::new(),
        false => format!(" Beside PyTorch tuned by hand: {}.", beside.join(", ")),
    };
    format!(
        "Medians of ratios over {} interleaved rounds, with the lowest and the highest; {machine}, libtorch \
         {libtorch}, {day} ([the record]({record}); `cargo xtask bench --{}`).{beside} What Overdrive uses, chosen by \
         trying at its start, so that another machine or day may choose otherwise: {}.",
        setting.rounds,
        setting.size,
        parts.join("; ")
    )
}

/// Begins in lower case, as after a colon.
fn lower(text: &str) -> String {
    let mut letters = text.chars();
    let first = letters.next().map(|first| first.to_lowercase().collect::<String>());
    first.unwrap_or_default() + letters.as_str().trim_end_matches('.')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Disturbance, sample};

    #[test]
    fn the_table_replaces_what_is_between_the_marks_and_nothing_else() {
        let report = sample::report();
        let readme = format!("# Title\n\n{}\nold\n{}\n\nafter\n", MARKS[0], MARKS[1]);
        let made = with_table(&readme, &report, "benches/record/a.json").unwrap();
        assert!(
            made.starts_with("# Title\n\n<!-- bench-table -->\n") && made.ends_with("<!-- /bench-table -->\n\nafter\n")
        );
        assert!(!made.contains("old"));
        assert_eq!(record_of(&made), Some("benches/record/a.json"));
        // Making it again changes nothing.
        assert_eq!(with_table(&made, &report, "benches/record/a.json").unwrap(), made);
        assert_eq!(with_table("no marks", &report, ""), None);
    }

    #[test]
    fn each_cell_is_the_reports_number() {
        let report = sample::report();
        let text = table(&report, "r.json");
        for workload in &report.workloads {
            let line = text.lines().find(|line| line.contains(&format!("**{}**", workload.measurements.workload)));
            let line = line.unwrap();
            let combined = workload.row(Contender::Combined).unwrap();
            let beside = combined.against.iter().find(|it| it.with == Contender::Pytorch).unwrap();
            assert!(line.contains(&format!(" | **{}** | 1 (", beside.text())), "{line}");
        }
        assert!(text.lines().all(|line| line.starts_with('|') || line.chars().count() <= WIDTH), "{text}");
    }

    #[test]
    fn a_training_that_was_disturbed_is_marked() {
        let mut report = sample::report();
        let marked = |report: &Report| table(report, "r.json").matches("; disturbed) to ").count();
        assert_eq!(marked(&report), 0);
        let workload = report.workloads.iter_mut().find(|it| it.rows.iter().any(|row| row.seconds.is_some())).unwrap();
        let one = workload.measurements.measured.iter_mut().find(|it| it.contender == Contender::Tch).unwrap();
        one.wholes[0].disturbance = Disturbance { other_cpus: 0.9, ..Disturbance::default() };
        assert_eq!(marked(&report), 1);
    }
}
