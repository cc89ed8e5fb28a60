//! Time by technique: a bar a row, split into computing and waiting for data.

use std::fmt::Write;

use super::{escape, ticks};
use crate::Row;
use crate::text::{points, seconds, times};

/// Share of the box that the longest whisker reaches, so that its end stays clear of the edge.
const REACH: f64 = 98.0;

/// The bars of one device's rows on one scale.
pub fn chart(rows: &[&Row]) -> String {
    let longest = rows.iter().map(|row| row.spread().high).fold(f64::MIN_POSITIVE, f64::max);
    let at = |seconds: f64| seconds / longest * REACH;
    let marks = ticks(0.0, longest, 5.0);
    let mut out = String::from("<div class=\"bars\">");
    for row in rows {
        bar(&mut out, row, &marks, at);
    }
    out.push_str("<div class=\"axis\"><svg width=\"100%\" height=\"20\" aria-hidden=\"true\">");
    for mark in &marks {
        let anchor = if *mark == 0.0 { "start" } else { "middle" };
        let unit = if *mark == 0.0 { " s" } else { "" };
        let _ = write!(out, "<text x=\"{:.2}%\" y=\"15\" text-anchor=\"{anchor}\">{mark}{unit}</text>", at(*mark));
    }
    out + "</svg></div></div>"
}

fn bar(out: &mut String, row: &Row, marks: &[f64], at: impl Fn(f64) -> f64) {
    let spread = row.spread();
    let waiting = spread.median * row.data_wait_fraction.clamp(0.0, 1.0);
    let computing = at(spread.median - waiting);
    let gain = times(row.speedup);
    let lost = if row.kept_accuracy {
        String::new()
    } else {
        format!("<em>accuracy {} points</em>", points(row.accuracy_delta_points))
    };
    let label =
        format!("{}: {} s, of which {} s waiting for data", row.technique, seconds(spread.median), seconds(waiting));
    // Writing to a string cannot fail.
    let _ = write!(
        out,
        "<div class=\"bar\"><div class=\"name\"><b>{}</b><span>{}</span></div>\
         <svg width=\"100%\" height=\"22\" role=\"img\" aria-label=\"{}\">",
        row.technique,
        escape(&row.technique.description()),
        escape(&label),
    );
    for mark in marks {
        let x = at(*mark);
        let _ = write!(out, "<line class=\"grid\" x1=\"{x:.2}%\" x2=\"{x:.2}%\" y1=\"0\" y2=\"22\"/>");
    }
    let _ = write!(
        out,
        "<rect class=\"compute\" width=\"{computing:.2}%\" y=\"3\" height=\"16\"/>\
         <rect class=\"wait\" x=\"{computing:.2}%\" width=\"{:.2}%\" y=\"3\" height=\"16\"/>\
         <line class=\"whisker\" x1=\"{:.2}%\" x2=\"{:.2}%\" y1=\"11\" y2=\"11\"/></svg>\
         <div class=\"value\"><b>{} s</b><span>{gain}</span>{lost}</div></div>",
        at(waiting),
        at(spread.low),
        at(spread.high),
        seconds(spread.median),
    );
}
