//! A chart of areas on top of each other, over time.

use std::fmt::Write;

use super::chart::{grid, labels, time_axis};
use super::text::{bytes, escape, ticks, time};

const HEIGHT: f64 = 190.0;
/// The number of strips with tooltips.
const MOST_PLACES: usize = 100;

/// What is added up: its name, its class in the style sheet, and a value for each time.
pub(super) struct Area<'a> {
    pub name: &'a str,
    pub class: &'static str,
    pub values: &'a [u64],
}

/// Areas of bytes at these seconds, the first at the bottom; a line shows the limit. None if the times cover nothing.
pub(super) fn draw(title: &str, seconds: &[f64], areas: &[Area<'_>], limit: Option<u64>) -> Option<String> {
    let (start, end) = (*seconds.first()?, *seconds.last()?);
    let len = areas.iter().map(|area| area.values.len()).fold(seconds.len(), usize::min);
    let is_ordered = seconds.windows(2).all(|pair| pair[0] <= pair[1]);
    if !(end > start && is_ordered) || len == 0 {
        return None;
    }
    let sum = |place: usize| areas.iter().map(|area| area.values[place] as f64).sum::<f64>();
    let high = (0..len).map(sum).fold(limit.map_or(1.0, |limit| limit as f64), f64::max);
    let x = |at: f64| 100.0 * (at - start) / (end - start);
    let y = |value: f64| HEIGHT * (1.0 - value / (1.04 * high));
    let mut out = format!("<figure><figcaption><b>{}</b><span class=\"legend\">", escape(title));
    for area in areas {
        let peak = bytes(area.values.iter().copied().max().unwrap_or(0) as f64);
        // Writing to a string cannot fail.
        let _ = write!(
            out,
            "<span><i class=\"box {}\"></i>{}, at most {}</span>",
            area.class,
            escape(area.name),
            escape(&peak)
        );
    }
    let _ = write!(
        out,
        "</span></figcaption><svg class=\"plot\" height=\"{}\" role=\"img\" aria-label=\"{}\">",
        HEIGHT + 20.0,
        escape(title)
    );
    let marks = ticks(high, 4.0);
    grid(&mut out, &marks, y);
    let _ = write!(
        out,
        "<svg width=\"100%\" height=\"{HEIGHT}\" viewBox=\"0 0 100 {HEIGHT}\" preserveAspectRatio=\"none\">"
    );
    let mut below = vec![0.0; len];
    for area in areas {
        let above: Vec<f64> = below.iter().zip(area.values).map(|(below, value)| below + *value as f64).collect();
        let edge = |values: &[f64]| -> Vec<String> {
            // A value lasts until the next one.
            let corners = (0..len).flat_map(|place| [(place, place), ((place + 1).min(len - 1), place)]);
            corners.map(|(time, place)| format!("{:.3},{:.1}", x(seconds[time]), y(values[place]))).collect()
        };
        let (mut points, back) = (edge(&above), edge(&below));
        points.extend(back.into_iter().rev());
        let _ = write!(out, "<polygon class=\"{}\" points=\"{}\"/>", area.class, points.join(" "));
        below = above;
    }
    out += "</svg>";
    if let Some(limit) = limit {
        let at = y(limit as f64);
        let _ = write!(
            out,
            "<line class=\"limit\" x1=\"0\" x2=\"100%\" y1=\"{at:.1}\" y2=\"{at:.1}\"><title>limit {}</title></line>",
            escape(&bytes(limit as f64))
        );
    }
    labels(&mut out, &marks, y, bytes);
    time_axis(&mut out, end - start, HEIGHT + 15.0);
    for strip in 0..MOST_PLACES {
        let from = start + (end - start) * strip as f64 / MOST_PLACES as f64;
        let place = seconds[..len].partition_point(|at| *at <= from).saturating_sub(1);
        let values: Vec<_> =
            areas.iter().map(|area| format!("{} {}", area.name, bytes(area.values[place] as f64))).collect();
        let label = format!("after {}: {}, {} in all", time(from - start), values.join(", "), bytes(sum(place)));
        let _ = write!(
            out,
            "<rect class=\"place\" x=\"{strip}%\" width=\"1%\" height=\"{HEIGHT}\"><title>{}</title></rect>",
            escape(&label)
        );
    }
    Some(out + "</svg></figure>")
}
