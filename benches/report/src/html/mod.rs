//! The report as an HTML page: one file that has no scripts and fetches nothing, light or dark like the reader's
//! system.
//!
//! In the bar charts and timelines, text is HTML, and only shapes and axis labels are SVG, placed in percent of the
//! width: so the text keeps its size on a narrow screen.

mod bars;
mod curves;
mod facts;
mod timeline;

use crate::report::WorkloadReport;
use crate::table::cells;
use crate::text::upper;
use crate::verdict::Outcome;
use crate::{Contender, Report, Setting, remarks};

/// The page of a report.
pub fn render(report: &Report) -> String {
    let mut conclusion = report.conclusion.iter().map(String::as_str);
    let headline = conclusion.next().unwrap_or("Nothing was compared.");
    // What is said of a workload stands in its section.
    let sections: String = report.workloads.iter().map(|workload| section(workload, &report.setting)).collect();
    let is_shown_below = |line: &&str| {
        report.workloads.iter().any(|it| {
            let rest = line.strip_prefix(&it.measurements.workload.name());
            rest.is_some_and(|rest| rest.starts_with([':', ',']))
        })
    };
    let advice = conclusion.filter(|line| !is_shown_below(line));
    let failed: String = report.setting.failures.iter().map(|failure| not_measured(failure)).collect();
    fill(
        include_str!("page.html"),
        &[
            ("style", include_str!("page.css")),
            ("summary", &escape(&facts::summary(report))),
            ("headline", &escape(headline)),
            ("advice", &paragraphs(advice)),
            ("sections", &(sections + &failed)),
            ("method", &paragraphs(report.setting.method.iter().map(String::as_str))),
            ("facts", &facts::list(report)),
        ],
    )
}

/// The section of a workload that failed as a whole: `text: the reason`.
fn not_measured(failure: &str) -> String {
    let (workload, reason) = failure.split_once(": ").unwrap_or(("", failure));
    format!("<section><h2>{}</h2><p>Not measured: {}</p></section>\n", escape(workload), escape(reason))
}

/// The charts and the table of one workload.
fn section(report: &WorkloadReport, setting: &Setting) -> String {
    let all = &report.measurements;
    let absent: Vec<String> =
        all.absent.iter().map(|(contender, reason)| format!("{} is absent: {reason}", contender.title())).collect();
    let facts = all.facts.iter().chain(&absent).map(String::as_str);
    let name = all.workload.name();
    let remarks: Vec<String> = remarks::of(report, setting)
        .iter()
        .map(|line| upper(line.strip_prefix(&name).unwrap_or(line).trim_start_matches([':', ',', ' '])))
        .collect();
    fill(
        include_str!("section.html"),
        &[
            ("name", &escape(&name)),
            ("samples", all.workload.samples()),
            ("facts", &paragraphs(facts)),
            ("remarks", &paragraphs(remarks.iter().map(String::as_str))),
            ("goals", &goals(report)),
            ("speed", &bars::speed(report)),
            ("memory", &bars::memory(report)),
            ("curves", &curves::section(report)),
            ("timeline", &timeline::section(report)),
            ("table", &table(report)),
        ],
    )
}

/// The goals and their results; nothing if all are disturbed, because the remarks say so.
fn goals(report: &WorkloadReport) -> String {
    let goal = |goal: &crate::verdict::GoalResult| {
        let with = goal.comparison.with.title();
        let class = match goal.outcome {
            Outcome::Met => "met",
            Outcome::Missed => "missed",
            Outcome::Undecided => "open",
            Outcome::Disturbed => return format!("<li>not comparable with {with}: timings were disturbed</li>"),
        };
        format!(
            "<li><b>{}</b> as fast as {with}: {} <span class=\"{class}\">{}</span></li>",
            escape(&goal.comparison.text()),
            goal.comparison.side(),
            goal.goal(),
        )
    };
    let list = |of_wholes: bool| {
        let goals: String = report.goals.iter().filter(|it| it.of_wholes == of_wholes).map(goal).collect();
        let basis = remarks::basis(of_wholes);
        match goals.is_empty() {
            true => goals,
            false => format!("<p class=\"basis\">In {basis}, Overdrive is</p><ul class=\"goals\">{goals}</ul>"),
        }
    };
    if remarks::says_nothing(report) { String::new() } else { list(true) + &list(false) }
}

fn table(report: &WorkloadReport) -> String {
    let (head, rows) = cells(report, true);
    let head: String = head.iter().map(|cell| format!("<th>{}</th>", escape(cell))).collect();
    let row = |(row, cells): (&crate::Row, Vec<String>)| {
        let cells: String = cells.iter().map(|cell| format!("<td>{}</td>", escape(cell))).collect();
        let disturbed = if row.disturbed > 0 { " *" } else { "" };
        let class = if row.disturbed > 0 { " class=\"disturbed\"" } else { class(row.contender) };
        format!("<tr{class}><th scope=\"row\">{}{disturbed}</th>{cells}</tr>", row.contender.title())
    };
    let rows: String = report.rows.iter().zip(rows).map(row).collect();
    let note = match report.rows.iter().any(|row| row.disturbed > 0) {
        true => "<p class=\"quiet\">* disturbed by other use of the machine</p>",
        false => "",
    };
    format!("<table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table>{note}")
}

/// The CSS class of a contender, which sets its colours.
fn class(contender: Contender) -> &'static str {
    match contender {
        contender if contender.is_python() => " class=\"python\"",
        Contender::Tch => " class=\"tch\"",
        Contender::Combined => " class=\"combined\"",
        _ => "",
    }
}

fn paragraphs<'a>(lines: impl Iterator<Item = &'a str>) -> String {
    lines.map(|line| format!("<p>{}</p>\n", escape(line))).collect()
}

/// `template` with each `{{name}}` replaced; one pass, so that a value is never searched for further names.
pub(crate) fn fill(template: &str, values: &[(&str, &str)]) -> String {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    while let Some((before, (name, after))) = rest.split_once("{{").and_then(|(b, r)| Some((b, r.split_once("}}")?))) {
        out.push_str(before);
        out.push_str(values.iter().find(|(key, _)| *key == name).map_or("", |(_, value)| value));
        rest = after;
    }
    out + rest
}

/// Text that is safe within an element and within a quoted attribute.
pub(crate) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            other => out.push(other),
        }
    }
    out
}

/// The multiples of 1, 2 or 5 times a power of ten from `low` to `high`, at most about `count` of them.
fn ticks(low: f64, high: f64, count: f64) -> Vec<f64> {
    let rough = (high - low) / count;
    if !rough.is_finite() || rough <= 0.0 {
        return vec![low];
    }
    let power = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power).into_iter().find(|step| *step >= rough);
    let step = step.unwrap_or(10.0 * power);
    let (first, last) = ((low / step - 1e-9).ceil() as i64, (high / step + 1e-9).floor() as i64);
    // Rounded, so that a label reads 0.3 and not 0.30000000000000004.
    (first..=last).map(|i| (i as f64 * step * 1e9).round() / 1e9).collect()
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
