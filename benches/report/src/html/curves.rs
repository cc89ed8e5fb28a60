//! Loss over time: one small chart per contender that trained from start to end. All charts have the same axes, and
//! each also shows the other contenders' curves in grey.

use std::fmt::Write;

use super::{escape, ticks};
use crate::report::WorkloadReport;
use crate::text::{accuracy, seconds};
use crate::{Mark, Row};

/// Width and height of a chart, and the margins around its plot, which leave room for the tick labels.
const SIZE: (f64, f64) = (300.0, 170.0);
const LEFT: f64 = 38.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 24.0;

/// A workload's charts under a heading; empty if no contender has a curve with a loss.
pub fn section(report: &WorkloadReport) -> String {
    let rows: Vec<&Row> = report.rows.iter().filter(|row| !row.curve.is_empty()).collect();
    let Some(scale) = Scale::of(&rows) else { return String::new() };
    let charts: String = rows.iter().map(|row| chart(row, &rows, &scale)).collect();
    format!("<h3>Loss over time, whole trainings</h3><div class=\"curves\">{charts}</div>")
}

/// Maps seconds and losses to pixels; all charts share it.
struct Scale {
    /// The largest time shown; the smallest is 0.
    seconds: f64,
    /// The lowest and the highest loss shown, with a margin.
    low: f64,
    high: f64,
}

impl Scale {
    fn of(rows: &[&Row]) -> Option<Self> {
        let marks = || rows.iter().flat_map(|row| &row.curve);
        let seconds = marks().map(|mark| mark.seconds).reduce(f64::max)?;
        let (low, high) =
            (marks().filter_map(|it| it.loss).reduce(f64::min)?, marks().filter_map(|it| it.loss).reduce(f64::max)?);
        let margin = ((high - low) * 0.08).max(1e-6);
        Some(Self { seconds: seconds.max(f64::MIN_POSITIVE), low: (low - margin).max(0.0), high: high + margin })
    }

    fn x(&self, seconds: f64) -> f64 {
        LEFT + seconds / self.seconds * (SIZE.0 - LEFT - RIGHT)
    }

    fn y(&self, loss: f64) -> f64 {
        let share = (loss - self.low) / (self.high - self.low).max(f64::MIN_POSITIVE);
        SIZE.1 - BOTTOM - share * (SIZE.1 - TOP - BOTTOM)
    }

    /// The pixel coordinates of the marks that have a loss.
    fn pixels(&self, curve: &[Mark]) -> Vec<(f64, f64)> {
        curve.iter().filter_map(|mark| Some((self.x(mark.seconds), self.y(mark.loss?)))).collect()
    }

    fn points(&self, curve: &[Mark]) -> String {
        let points = self.pixels(curve).into_iter().map(|(x, y)| format!("{x:.1},{y:.1}"));
        points.collect::<Vec<String>>().join(" ")
    }
}

fn chart(row: &Row, rows: &[&Row], scale: &Scale) -> String {
    let last_seconds = row.curve.last().map_or(f64::NAN, |mark| mark.seconds);
    let result = match (row.accuracy, row.loss) {
        (Some(share), _) => accuracy(share),
        (None, Some(loss)) => format!("{loss:.3}"),
        (None, None) => "loss not finite".to_owned(),
    };
    let summary = format!("{result} after {} s", seconds(last_seconds));
    let mut out = format!(
        "<figure><figcaption><b>{}</b><span>{}</span></figcaption>\
         <svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">",
        row.contender.title(),
        escape(&summary),
        SIZE.0,
        SIZE.1,
        escape(&format!("{}: {summary}", row.contender.title())),
    );
    axes(&mut out, scale);
    for other in rows.iter().filter(|other| other.contender != row.contender) {
        let _ = write!(out, "<polyline class=\"other\" points=\"{}\"/>", scale.points(&other.curve));
    }
    let _ = write!(out, "<polyline class=\"line\" points=\"{}\"/>", scale.points(&row.curve));
    for (x, y) in scale.pixels(&row.curve) {
        let _ = write!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.6\"/>");
    }
    out + "</svg></figure>"
}

/// Draws the axes: grid lines with loss labels on the left, and time labels below. The results of `write!` are dropped,
/// because writing to a string cannot fail.
fn axes(out: &mut String, scale: &Scale) {
    let (right, bottom) = (SIZE.0 - RIGHT, SIZE.1 - BOTTOM);
    for tick in ticks(scale.low, scale.high, 4.0) {
        let y = scale.y(tick);
        let _ = write!(
            out,
            "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{tick}</text>",
            LEFT - 6.0,
            y + 4.0,
        );
    }
    for tick in ticks(0.0, scale.seconds, 4.0) {
        let x = scale.x(tick);
        // The unit is written once, at the first label.
        let unit = if tick == 0.0 { " s" } else { "" };
        let _ = write!(out, "<text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{tick}{unit}</text>", bottom + 17.0);
    }
}
