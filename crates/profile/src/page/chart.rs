//! Line charts over time.
//!
//! Text is positioned in percent of the chart's width and only the lines are stretched, so that text keeps its size on
//! a narrow screen.

use std::fmt::Write;

use super::text::{escape, tick, ticks, time};

const HEIGHT: f64 = 120.0;
/// The maximum number of points of a line; more are averaged.
const MOST_POINTS: usize = 400;
/// The number of strips with tooltips.
const MOST_PLACES: usize = 100;

/// A line: its name, and its points by time in seconds. Unknown values are None.
pub(super) struct Series {
    pub name: String,
    pub points: Vec<(f64, Option<f64>)>,
}

/// A chart of lines that share a scale, which begins at 0.
pub(super) struct Lines<'a> {
    pub title: &'a str,
    pub series: Vec<Series>,
    /// The scale reaches at least this value, such as the number of CPUs.
    pub reach: f64,
    pub unit: fn(f64) -> String,
}

impl Lines<'_> {
    /// Draws the chart. None if the points do not cover any time.
    pub fn draw(self) -> Option<String> {
        let series: Vec<Series> = self.series.into_iter().filter_map(finite).collect();
        let all = || series.iter().flat_map(|series| &series.points);
        let (start, end) =
            all().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), point| (low.min(point.0), high.max(point.0)));
        if end <= start {
            return None;
        }
        let high = all().filter_map(|point| point.1).fold(self.reach, f64::max);
        let high = if high > 0.0 { high } else { 1.0 };
        let x = |at: f64| 100.0 * (at - start) / (end - start);
        let y = |value: f64| HEIGHT * (1.0 - value / (1.04 * high));
        let binned: Vec<Series> = series.iter().map(|series| bin(series, start, end, MOST_POINTS)).collect();
        let mut out = format!("<figure><figcaption><b>{}</b><span class=\"legend\">", escape(self.title));
        for (number, series) in series.iter().enumerate() {
            let peak = series.points.iter().filter_map(|point| point.1).fold(0.0, f64::max);
            let (name, peak) = (escape(&series.name), escape(&(self.unit)(peak)));
            // Writing to a string cannot fail.
            let _ = write!(out, "<span><i class=\"line s{number}\"></i>{name}, at most {peak}</span>");
        }
        let _ = write!(out, "</span></figcaption><svg class=\"plot\" height=\"{}\" role=\"img\"", HEIGHT + 20.0);
        let _ = write!(out, " aria-label=\"{}\">", escape(self.title));
        let marks = ticks(high, 3.0);
        grid(&mut out, &marks, y);
        let _ = write!(
            out,
            "<svg width=\"100%\" height=\"{HEIGHT}\" viewBox=\"0 0 100 {HEIGHT}\" preserveAspectRatio=\"none\">"
        );
        for (number, series) in binned.iter().enumerate() {
            for run in series.points.split(|point| point.1.is_none()).filter(|run| !run.is_empty()) {
                let place = |&(at, value): &(f64, Option<f64>)| format!("{:.3},{:.1}", x(at), y(value.unwrap_or(0.0)));
                let places = run.iter().map(place).collect::<Vec<_>>().join(" ");
                let _ = write!(out, "<polyline class=\"s{number}\" points=\"{places}\"/>");
            }
        }
        out += "</svg>";
        labels(&mut out, &marks, y, self.unit);
        time_axis(&mut out, end - start, HEIGHT + 15.0);
        places(&mut out, &series, start, end, self.unit);
        Some(out + "</svg></figure>")
    }
}

/// Draws a line at each mark of the scale.
pub(super) fn grid(out: &mut String, marks: &[f64], y: impl Fn(f64) -> f64) {
    for mark in marks {
        let at = y(*mark);
        let _ = write!(out, "<line class=\"grid\" x1=\"0\" x2=\"100%\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>");
    }
}

/// Draws the labels of the marks, but for 0.
pub(super) fn labels(out: &mut String, marks: &[f64], y: impl Fn(f64) -> f64, unit: fn(f64) -> String) {
    for mark in marks.iter().filter(|mark| **mark > 0.0) {
        let (at, label) = (y(*mark) + 4.0, escape(&tick(&unit(*mark))));
        let _ = write!(out, "<text x=\"-8\" y=\"{at:.1}\" text-anchor=\"end\">{label}</text>");
    }
}

/// Draws the time labels below a chart that covers `span` seconds.
pub(super) fn time_axis(out: &mut String, span: f64, y: f64) {
    for mark in ticks(span, 5.0) {
        let at = 100.0 * mark / span;
        let anchor = match at {
            at if at < 2.0 => "start",
            at if at > 96.0 => "end",
            _ => "middle",
        };
        let label = if mark == 0.0 { "0".to_owned() } else { tick(&time(mark)) };
        let _ = write!(out, "<text x=\"{at:.2}%\" y=\"{y}\" text-anchor=\"{anchor}\">{label}</text>");
    }
}

/// Draws invisible strips whose tooltips show the figures at their time.
fn places(out: &mut String, series: &[Series], start: f64, end: f64, unit: fn(f64) -> String) {
    let coarse: Vec<Series> = series.iter().map(|series| bin(series, start, end, MOST_PLACES)).collect();
    let width = 100.0 / MOST_PLACES as f64;
    for place in 0..MOST_PLACES {
        let from = start + (end - start) * place as f64 / MOST_PLACES as f64;
        let to = start + (end - start) * (place + 1) as f64 / MOST_PLACES as f64;
        let value = |series: &Series| {
            let here = |point: &&(f64, Option<f64>)| (from..=to).contains(&point.0);
            let value = series.points.iter().find(here)?.1?;
            Some(format!("{} {}", series.name, unit(value)))
        };
        let values: Vec<String> = coarse.iter().filter_map(value).collect();
        if !values.is_empty() {
            let label = escape(&format!("after {}: {}", time(from - start), values.join(", ")));
            let _ = write!(
                out,
                "<rect class=\"place\" x=\"{:.2}%\" width=\"{width:.2}%\" height=\"{HEIGHT}\"><title>{label}</title></rect>",
                width * place as f64
            );
        }
    }
}

/// Drops invalid numbers. None if nothing is left.
fn finite(mut series: Series) -> Option<Series> {
    series.points.retain(|point| point.0.is_finite());
    for point in &mut series.points {
        point.1 = point.1.filter(|value| value.is_finite() && *value >= 0.0);
    }
    series.points.iter().any(|point| point.1.is_some()).then_some(series)
}

/// Averages the points over `bins` equal spans of time. A span without any value stays missing.
fn bin(series: &Series, start: f64, end: f64, bins: usize) -> Series {
    if series.points.len() <= bins {
        return Series { name: series.name.clone(), points: series.points.clone() };
    }
    let mut sums = vec![(0.0, 0.0, 0.0, 0.0); bins];
    for &(at, value) in &series.points {
        let sum = &mut sums[((((at - start) / (end - start)) * bins as f64) as usize).min(bins - 1)];
        *sum = (sum.0 + at, sum.1 + 1.0, sum.2 + value.unwrap_or(0.0), sum.3 + f64::from(u8::from(value.is_some())));
    }
    let filled = sums.into_iter().filter(|sum| sum.1 > 0.0);
    let points = filled.map(|(at, all, value, known)| (at / all, (known > 0.0).then(|| value / known)));
    Series { name: series.name.clone(), points: points.collect() }
}
