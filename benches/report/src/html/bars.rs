//! Bar charts with one bar per contender: speed, divided into the shares of computing and of waiting for data; and peak
//! memory.

use std::fmt::Write;

use super::{class, escape, ticks};
use crate::report::WorkloadReport;
use crate::text::{bytes, list, rate, times};
use crate::{Contender, Row};

/// Percentage of the box's width at which the longest bar or whisker ends, so that its end is not clipped.
pub(super) const REACH: f64 = 98.0;

/// One bar.
struct Bar {
    contender: Contender,
    note: String,
    /// Lengths of the computing part and of the whole bar, in the chart's unit.
    parts: (f64, f64),
    whisker: Option<(f64, f64)>,
    value: String,
    more: String,
}

/// The chart of samples per second.
pub fn speed(report: &WorkloadReport) -> String {
    let bar = |row: &Row| {
        let spread = row.rate?;
        let against = row.against.iter().find(|it| it.with == Contender::Pytorch).or(row.against.last());
        let more = against.map_or(String::new(), |it| match it.disturbed {
            0 if it.pairs == 2 => format!("{} of {}", it.text(), it.with.title()),
            0 => format!("{} of {}", times(it.ratio.median), it.with.title()),
            _ => format!("not comparable with {}: disturbed", it.with.title()),
        });
        Some(Bar {
            contender: row.contender,
            note: note(report, row.contender),
            parts: (spread.median * (1.0 - row.wait_share.unwrap_or(0.0).clamp(0.0, 1.0)), spread.median),
            whisker: Some((spread.low, spread.high)),
            value: rate(spread.median),
            more,
        })
    };
    chart(&report.rows.iter().filter_map(bar).collect::<Vec<_>>(), &|tick| tick.to_string())
}

/// What it is: the techniques of ours, the options that were chosen, or else its description.
fn note(report: &WorkloadReport, contender: Contender) -> String {
    let parts = match contender {
        Contender::Combined => list(&report.measurements.parts),
        _ => String::new(),
    };
    let choices = report.measurements.of(contender).map(|it| it.choices.clone()).unwrap_or_default();
    let said: Vec<String> = std::iter::once(parts).chain(choices).filter(|part| !part.is_empty()).collect();
    if said.is_empty() { contender.description().replace('`', "") } else { said.join("; ") }
}

/// The chart of peak memory: the GPU's where it was measured, else the process's.
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
    chart(&report.rows.iter().filter_map(bar).collect::<Vec<_>>(), &|tick| format!("{tick} MiB"))
}

fn chart(bars: &[Bar], label: &dyn Fn(f64) -> String) -> String {
    let longest = bars.iter().map(|bar| bar.whisker.map_or(bar.parts.1, |(_, high)| high));
    let longest = longest.fold(f64::MIN_POSITIVE, f64::max);
    let at = |value: f64| value / longest * REACH;
    let ticks = ticks(0.0, longest, 4.0);
    let mut out = String::from("<div class=\"bars\">");
    for bar in bars {
        draw(&mut out, bar, &ticks, &at);
    }
    out.push_str("<div class=\"axis\"><svg width=\"100%\" height=\"20\" aria-hidden=\"true\">");
    for tick in &ticks {
        let anchor = if *tick == 0.0 { "start" } else { "middle" };
        let text = if *tick == 0.0 { "0".to_owned() } else { label(*tick) };
        let _ = write!(out, "<text x=\"{:.2}%\" y=\"15\" text-anchor=\"{anchor}\">{text}</text>", at(*tick));
    }
    out + "</svg></div></div>"
}

fn draw(out: &mut String, bar: &Bar, ticks: &[f64], at: &impl Fn(f64) -> f64) {
    let label = format!("{}: {}", bar.contender.title(), bar.value);
    // Writing to a string cannot fail.
    let _ = write!(
        out,
        "<div class=\"bar\"><div class=\"name\"><b>{}</b><span>{}</span></div>\
         <svg{} width=\"100%\" height=\"22\" role=\"img\" aria-label=\"{}\">",
        escape(&bar.contender.title()),
        escape(&bar.note),
        class(bar.contender),
        escape(&label),
    );
    for tick in ticks {
        let x = at(*tick);
        let _ = write!(out, "<line class=\"grid\" x1=\"{x:.2}%\" x2=\"{x:.2}%\" y1=\"0\" y2=\"22\"/>");
    }
    let (compute, whole) = (at(bar.parts.0), at(bar.parts.1));
    let _ = write!(
        out,
        "<rect class=\"compute\" width=\"{compute:.2}%\" y=\"3\" height=\"16\"/>\
         <rect class=\"wait\" x=\"{compute:.2}%\" width=\"{:.2}%\" y=\"3\" height=\"16\"/>",
        whole - compute,
    );
    if let Some((low, high)) = bar.whisker {
        // The halo, in the colour of the page, sets the line off from bars of a similar colour.
        for class in ["halo", "whisker"] {
            let (low, high) = (at(low), at(high));
            let _ = write!(out, "<line class=\"{class}\" x1=\"{low:.2}%\" x2=\"{high:.2}%\" y1=\"11\" y2=\"11\"/>");
        }
    }
    let _ = write!(
        out,
        "</svg><div class=\"value\"><b>{}</b><span>{}</span></div></div>",
        escape(&bar.value),
        escape(&bar.more),
    );
}
