//! Accuracy against time: a small chart a technique, all on the same scales, each with the other techniques in grey.
//!
//! Seven lines that end at nearly the same accuracy cannot be told apart in one chart, by colour least of all.

use std::fmt::Write;

use super::{escape, ticks};
use crate::text::{accuracy, seconds};
use crate::{EpochMark, Row};

/// The size of one chart, and the room around its plot for the scales' labels and the last value.
const SIZE: (f64, f64) = (300.0, 170.0);
const LEFT: f64 = 38.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 24.0;

/// The charts of one device's rows.
pub fn charts(rows: &[&Row]) -> String {
    let Some(scale) = Scale::of(rows) else {
        return "<p class=\"quiet\">No accuracy was measured during the runs.</p>".to_owned();
    };
    let charts: String = rows.iter().map(|row| chart(row, rows, &scale)).collect();
    format!("<div class=\"curves\">{charts}</div>")
}

/// The scales that all charts share.
struct Scale {
    seconds: f64,
    low: f64,
    high: f64,
}

impl Scale {
    fn of(rows: &[&Row]) -> Option<Self> {
        let marks = || rows.iter().flat_map(|row| &row.curve);
        let reduce = |value: fn(&EpochMark) -> f64, fold: fn(f64, f64) -> f64| marks().map(value).reduce(fold);
        let seconds = reduce(|mark| mark.seconds, f64::max)?;
        let (low, high) = (reduce(|mark| mark.accuracy, f64::min)?, reduce(|mark| mark.accuracy, f64::max)?);
        let room = ((high - low) * 0.08).max(0.001);
        Some(Self { seconds: seconds.max(f64::MIN_POSITIVE), low: (low - room).max(0.0), high: (high + room).min(1.0) })
    }

    fn x(&self, seconds: f64) -> f64 {
        LEFT + seconds / self.seconds * (SIZE.0 - LEFT - RIGHT)
    }

    fn y(&self, accuracy: f64) -> f64 {
        let share = (accuracy - self.low) / (self.high - self.low).max(f64::MIN_POSITIVE);
        SIZE.1 - BOTTOM - share * (SIZE.1 - TOP - BOTTOM)
    }

    /// The points of a line.
    fn points(&self, curve: &[EpochMark]) -> String {
        let point = |mark: &EpochMark| format!("{:.1},{:.1}", self.x(mark.seconds), self.y(mark.accuracy));
        curve.iter().map(point).collect::<Vec<String>>().join(" ")
    }
}

fn chart(row: &Row, rows: &[&Row], scale: &Scale) -> String {
    let said = row.curve.last().map_or_else(
        || "not measured".to_owned(),
        |mark| format!("{} after {} s", accuracy(mark.accuracy), seconds(mark.seconds)),
    );
    let mut out = format!(
        "<figure><figcaption><b>{}</b><span>{}</span></figcaption>\
         <svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">",
        row.technique,
        escape(&said),
        SIZE.0,
        SIZE.1,
        escape(&format!("{}: accuracy {said}", row.technique)),
    );
    axes(&mut out, scale);
    // The baseline last, so that no other line hides it.
    let (base, others): (Vec<&Row>, Vec<&Row>) =
        rows.iter().filter(|other| other.technique != row.technique).partition(|other| other.is_baseline());
    for (class, other) in others.iter().map(|other| ("other", other)).chain(base.iter().map(|base| ("base", base))) {
        let _ = write!(out, "<polyline class=\"{class}\" points=\"{}\"/>", scale.points(&other.curve));
    }
    let _ = write!(out, "<polyline class=\"line\" points=\"{}\"/>", scale.points(&row.curve));
    for mark in &row.curve {
        let (x, y) = (scale.x(mark.seconds), scale.y(mark.accuracy));
        let _ = write!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.6\"/>");
    }
    out + "</svg></figure>"
}

/// The scales; writing to a string cannot fail.
fn axes(out: &mut String, scale: &Scale) {
    let (right, bottom) = (SIZE.0 - RIGHT, SIZE.1 - BOTTOM);
    let marks = ticks(scale.low, scale.high, 4.0);
    // As many digits as tell one mark from the next.
    let digits = match marks.as_slice() {
        [first, second, ..] if second - first < 0.000_99 => 2,
        [first, second, ..] if second - first > 0.009_9 => 0,
        _ => 1,
    };
    for mark in marks {
        let (y, percent) = (scale.y(mark), mark * 100.0);
        let _ = write!(
            out,
            "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{percent:.digits$}%</text>",
            LEFT - 6.0,
            y + 4.0,
        );
    }
    for mark in ticks(0.0, scale.seconds, 4.0) {
        let x = scale.x(mark);
        let unit = if mark == 0.0 { " s" } else { "" };
        let _ = write!(out, "<text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{mark}{unit}</text>", bottom + 17.0);
    }
}
