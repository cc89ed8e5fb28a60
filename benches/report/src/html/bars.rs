//! Bars by contender: speed, split by the shares of computing and of waiting for data; and memory.

use std::fmt::Write;

use super::{class, escape, ticks};
use crate::report::WorkloadReport;
use crate::text::{bytes, rate};
use crate::{Contender, Row};

/// Share of the box that the longest whisker reaches, so that its end stays clear of the edge.
const REACH: f64 = 98.0;

/// One bar.
struct Bar {
    contender: Contender,
    note: String,
    /// Length of its first part, and of both.
    parts: (f64, f64),
    whisker: Option<(f64, f64)>,
    value: String,
    more: String,
}

/// Samples a second on one scale.
pub fn speed(report: &WorkloadReport) -> String {
    let bar = |row: &Row| {
        let spread = row.rate?;
        let against = row.against.iter().find(|it| it.with == Contender::Pytorch).or(row.against.last());
        let choices = report.measurements.of(row.contender).map(|it| it.choices.join("; ")).unwrap_or_default();
        let more = against.map_or(String::new(), |it| format!("{:.2}\u{d7} the speed of {}", it.ratio.median, it.with));
        Some(Bar {
            contender: row.contender,
            note: if choices.is_empty() { row.contender.description() } else { choices },
            parts: (spread.median * (1.0 - row.wait_share.unwrap_or(0.0).clamp(0.0, 1.0)), spread.median),
            whisker: Some((spread.low, spread.high)),
            value: rate(spread.median),
            more,
        })
    };
    chart(&report.rows.iter().filter_map(bar).collect::<Vec<_>>(), &|mark| mark.to_string())
}

/// Memory on one scale.
pub fn memory(report: &WorkloadReport) -> String {
    let bar = |row: &Row| {
        let measured = report.measurements.of(row.contender)?;
        let held = measured.peak_device_bytes.or(measured.peak_bytes)?;
        let mebibytes = held as f64 / f64::from(1 << 20);
        let more = if measured.peak_device_bytes.is_some() { "on the GPU" } else { "" };
        Some(Bar {
            contender: row.contender,
            note: String::new(),
            parts: (mebibytes, mebibytes),
            whisker: None,
            value: bytes(Some(held)),
            more: more.to_owned(),
        })
    };
    chart(&report.rows.iter().filter_map(bar).collect::<Vec<_>>(), &|mark| format!("{mark} MiB"))
}

fn chart(bars: &[Bar], label: &dyn Fn(f64) -> String) -> String {
    let longest = bars.iter().map(|bar| bar.whisker.map_or(bar.parts.1, |(_, high)| high));
    let longest = longest.fold(f64::MIN_POSITIVE, f64::max);
    let at = |value: f64| value / longest * REACH;
    let marks = ticks(0.0, longest, 4.0);
    let mut out = String::from("<div class=\"bars\">");
    for bar in bars {
        draw(&mut out, bar, &marks, &at);
    }
    out.push_str("<div class=\"axis\"><svg width=\"100%\" height=\"20\" aria-hidden=\"true\">");
    for mark in &marks {
        let anchor = if *mark == 0.0 { "start" } else { "middle" };
        let text = if *mark == 0.0 { "0".to_owned() } else { label(*mark) };
        let _ = write!(out, "<text x=\"{:.2}%\" y=\"15\" text-anchor=\"{anchor}\">{text}</text>", at(*mark));
    }
    out + "</svg></div></div>"
}

fn draw(out: &mut String, bar: &Bar, marks: &[f64], at: &impl Fn(f64) -> f64) {
    let label = format!("{}: {}", bar.contender, bar.value);
    // Writing to a string cannot fail.
    let _ = write!(
        out,
        "<div class=\"bar\"><div class=\"name\"><b>{}</b><span>{}</span></div>\
         <svg{} width=\"100%\" height=\"22\" role=\"img\" aria-label=\"{}\">",
        bar.contender,
        escape(&bar.note),
        class(bar.contender),
        escape(&label),
    );
    for mark in marks {
        let x = at(*mark);
        let _ = write!(out, "<line class=\"grid\" x1=\"{x:.2}%\" x2=\"{x:.2}%\" y1=\"0\" y2=\"22\"/>");
    }
    let (first, both) = (at(bar.parts.0), at(bar.parts.1));
    let _ = write!(
        out,
        "<rect class=\"compute\" width=\"{first:.2}%\" y=\"3\" height=\"16\"/>\
         <rect class=\"wait\" x=\"{first:.2}%\" width=\"{:.2}%\" y=\"3\" height=\"16\"/>",
        both - first,
    );
    if let Some((low, high)) = bar.whisker {
        let _ =
            write!(out, "<line class=\"whisker\" x1=\"{:.2}%\" x2=\"{:.2}%\" y1=\"11\" y2=\"11\"/>", at(low), at(high));
    }
    let _ = write!(
        out,
        "</svg><div class=\"value\"><b>{}</b><span>{}</span></div></div>",
        escape(&bar.value),
        escape(&bar.more),
    );
}
