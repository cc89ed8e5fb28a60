//! The report as a page: one file without scripts or anything fetched, light or dark as its reader's system is.
//!
//! Text is HTML and only shapes are SVG, in percent of their box, so that nothing shrinks on a narrow screen.

mod bars;
mod curves;
mod facts;

use std::fmt::Write;

use crate::notes::notes;
use crate::text::{accuracy, bytes, percent, points, seconds, times};
use crate::{DeviceKind, Report, Row};

/// The page of a report.
pub fn render(report: &Report) -> String {
    let mut advice = report.advice.lines();
    let headline = advice.next().unwrap_or("No advice: nothing was compared.");
    let devices = report.devices();
    let sections: String = devices.iter().map(|&device| section(report, device, devices.len() > 1)).collect();
    fill(
        include_str!("page.html"),
        &[
            ("style", include_str!("page.css")),
            ("summary", &escape(&facts::summary(report))),
            ("headline", &escape(headline)),
            ("advice", &paragraphs(advice)),
            ("sections", &sections),
            ("notes", &paragraphs(notes(report).iter().map(String::as_str))),
            ("method", &facts::method(report)),
            ("facts", &facts::list(report)),
        ],
    )
}

/// The charts and the table of one device.
fn section(report: &Report, device: DeviceKind, named: bool) -> String {
    let rows: Vec<&Row> = report.rows_on(device).collect();
    let name = match device {
        _ if !named => "",
        DeviceKind::Cpu => "<h2 class=\"device\">On the processor</h2>",
        DeviceKind::Cuda => "<h2 class=\"device\">On the GPU</h2>",
    };
    fill(
        include_str!("section.html"),
        &[
            ("device", name),
            ("bars", &bars::chart(&rows)),
            ("curves", &curves::charts(&rows)),
            ("table", &table(&rows)),
        ],
    )
}

fn table(rows: &[&Row]) -> String {
    let with_device = rows.iter().any(|row| row.peak_device_bytes.is_some());
    let device_head = if with_device { "<th>Device memory</th>" } else { "" };
    let mut out = format!(
        "<table><thead><tr><th>Technique</th><th>Median time</th><th>Low\u{2013}high</th><th>Speed\u{2011}up</th>\
         <th>Low\u{2013}high</th><th>Accuracy</th><th>Change, points</th><th>Peak memory</th>{device_head}\
         <th>Data wait</th><th>Accuracy kept</th></tr></thead><tbody>"
    );
    for row in rows {
        let spread = row.spread();
        let mut cells = vec![
            format!("{} s", seconds(spread.median)),
            format!("{}\u{2013}{}", seconds(spread.low), seconds(spread.high)),
            times(row.speedup),
            format!("{}\u{2013}{}", times(row.speedup_low), times(row.speedup_high)),
            accuracy(row.accuracy),
            points(row.accuracy_delta_points),
            bytes(row.peak_rss_bytes),
        ];
        cells.extend(with_device.then(|| bytes(row.peak_device_bytes)));
        cells.push(percent(row.data_wait_fraction));
        cells.push(kept(row).to_owned());
        let cells: String = cells.iter().map(|cell| format!("<td>{}</td>", escape(cell))).collect();
        let class = if row.kept_accuracy { "" } else { " class=\"lost\"" };
        // Writing to a string cannot fail.
        let _ = write!(out, "<tr{class}><th scope=\"row\">{}</th>{cells}</tr>", row.technique);
    }
    out + "</tbody></table>"
}

/// What the guard says of a row.
fn kept(row: &Row) -> &'static str {
    match row {
        row if row.is_baseline() => "\u{2013}",
        row if row.kept_accuracy => "yes",
        _ => "no",
    }
}

fn paragraphs<'a>(lines: impl Iterator<Item = &'a str>) -> String {
    lines.map(|line| format!("<p>{}</p>\n", escape(line))).collect()
}

/// `template` with each `{{name}}` replaced; one pass, so that a value is never searched for further names.
fn fill(template: &str, values: &[(&str, &str)]) -> String {
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
fn escape(text: &str) -> String {
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
