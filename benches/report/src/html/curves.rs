//! Loss over time of whole trainings: a small chart a contender, all on the same scales, each with the others in grey.

use std::fmt::Write;

use super::{escape, ticks};
use crate::report::WorkloadReport;
use crate::text::{accuracy, seconds};
use crate::{Mark, Row};

/// The size of one chart, and the room around its plot for the scales' labels and the last value.
const SIZE: (f64, f64) = (300.0, 170.0);
const LEFT: f64 = 38.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 24.0;

/// The charts of a workload with their heading; nothing where nothing was trained as a whole.
pub fn section(report: &WorkloadReport) -> String {
    let rows: Vec<&Row> = report.rows.iter().filter(|row| !row.curve.is_empty()).collect();
    let Some(scale) = Scale::of(&rows) else { return String::new() };
    let charts: String = rows.iter().map(|row| chart(row, &rows, &scale)).collect();
    format!("<h3>Loss over time, whole trainings</h3><div class=\"curves\">{charts}</div>")
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
        let seconds = marks().map(|mark| mark.seconds).reduce(f64::max)?;
        let (low, high) =
            (marks().filter_map(|it| it.loss).reduce(f64::min)?, marks().filter_map(|it| it.loss).reduce(f64::max)?);
        let room = ((high - low) * 0.08).max(1e-6);
        Some(Self { seconds: seconds.max(f64::MIN_POSITIVE), low: (low - room).max(0.0), high: high + room })
    }

    fn x(&self, seconds: f64) -> f64 {
        LEFT + seconds / self.seconds * (SIZE.0 - LEFT - RIGHT)
    }

    fn y(&self, loss: f64) -> f64 {
        let share = (loss - self.low) / (self.high - self.low).max(f64::MIN_POSITIVE);
        SIZE.1 - BOTTOM - share * (SIZE.1 - TOP - BOTTOM)
    }

    /// The places of the marks that have a loss.
    fn places(&self, curve: &[Mark]) -> Vec<(f64, f64)> {
        curve.iter().filter_map(|mark| Some((self.x(mark.seconds), self.y(mark.loss?)))).collect()
    }

    fn points(&self, curve: &[Mark]) -> String {
        let points = self.places(curve).into_iter().map(|(x, y)| format!("{x:.1},{y:.1}"));
        points.collect::<Vec<String>>().join(" ")
    }
}

fn chart(row: &Row, rows: &[&Row], scale: &Scale) -> String {
    let after = row.curve.last().map_or(f64::NAN, |mark| mark.seconds);
    let result = match (row.accuracy, row.loss) {
        (Some(share), _) => accuracy(share),
        (None, Some(loss)) => format!("{loss:.3}"),
        (None, None) => "not finite".to_owned(),
    };
    let said = format!("{result} after {} s", seconds(after));
    let mut out = format!(
        "<figure><figcaption><b>{}</b><span>{}</span></figcaption>\
         <svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">",
        row.contender,
        escape(&said),
        SIZE.0,
        SIZE.1,
        escape(&format!("{}: {said}", row.contender)),
    );
    axes(&mut out, scale);
    for other in rows.iter().filter(|other| other.contender != row.contender) {
        let _ = write!(out, "<polyline class=\"other\" points=\"{}\"/>", scale.points(&other.curve));
    }
    let _ = write!(out, "<polyline class=\"line\" points=\"{}\"/>", scale.points(&row.curve));
    for (x, y) in scale.places(&row.curve) {
        let _ = write!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.6\"/>");
    }
    out + "</svg></figure>"
}

/// The scales; writing to a string cannot fail.
fn axes(out: &mut String, scale: &Scale) {
    let (right, bottom) = (SIZE.0 - RIGHT, SIZE.1 - BOTTOM);
    for mark in ticks(scale.low, scale.high, 4.0) {
        let y = scale.y(mark);
        let _ = write!(
            out,
            "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{mark}</text>",
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
