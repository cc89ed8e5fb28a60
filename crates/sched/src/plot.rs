//! Plots of schedules, as SVG.

use std::fmt::Write;

use crate::{Plan, ScheduleError, Scheduler};

/// The most points per line: a screen shows no more.
const POINTS: u64 = 720;
const WIDTH: f64 = 720.0;
/// The height of one panel, including its labels.
const HEIGHT: f64 = 240.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 36.0;
const BOTTOM: f64 = 28.0;
/// The most labels below a sweep.
#[cfg(feature = "torch")]
const LABELS: usize = 8;
/// The number of line colours: distinguishable on white, on black and for the colour-blind.
const COLOURS: usize = 4;
const STYLE: &str = "<style>\
    text{font:12px system-ui,sans-serif;fill:#57606a}.title{font-weight:600;fill:#24292f}\
    .grid{stroke:#d0d7de}.line{fill:none;stroke-width:2;stroke-linejoin:round}\
    .c0{stroke:#0969da}.c1{stroke:#bc4c00}.c2{stroke:#1a7f37}.c3{stroke:#8250df}\
    @media(prefers-color-scheme:dark){text{fill:#9198a1}.title{fill:#f0f6fc}.grid{stroke:#3d444d}\
    .c0{stroke:#4493f8}.c1{stroke:#f0883e}.c2{stroke:#3fb950}.c3{stroke:#ab7df8}}\
    </style>";

/// Plots a schedule's rates over the first `steps` steps as SVG: one line for each base rate, and a second panel for
/// the momentum if the schedule cycles it. It suits light and dark pages.
///
/// ```
/// use overdrive_sched::{StepLr, plot};
///
/// let svg = plot("StepLr", StepLr::new(30), &[0.1], 100)?;
/// assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
/// # Ok::<(), overdrive_sched::ScheduleError>(())
/// ```
///
/// # Errors
/// Those of [`Scheduler::new`] and [`Scheduler::step`].
pub fn plot(title: &str, schedule: impl Into<Plan>, base_lrs: &[f64], steps: u64) -> Result<String, ScheduleError> {
    let mut sched = Scheduler::new(base_lrs, schedule)?;
    let mut rates = vec![Vec::new(); base_lrs.len()];
    let mut momenta = vec![Vec::new(); base_lrs.len()];
    for step in points(steps) {
        while sched.last_epoch() < step {
            sched.step()?;
        }
        for (group, lr) in sched.last_lr().iter().enumerate() {
            rates[group].push((step, *lr));
            momenta[group].extend(sched.momentum(group).map(|momentum| (step, momentum)));
        }
    }
    momenta.retain(|line| !line.is_empty());
    let mut panels = vec![("learning rate", rates)];
    if !momenta.is_empty() {
        panels.push(("momentum", momenta));
    }
    Ok(svg(title, steps, &step_marks(steps), &panels))
}

/// Plots a function of the step as SVG: a curriculum's fraction, or an image size.
///
/// ```
/// use overdrive_sched::{Curriculum, plot_values};
///
/// let curriculum = Curriculum::linear(0.1, 80)?;
/// let svg = plot_values("Curriculum::linear", "share of the data", 100, |step| curriculum.share(step));
/// assert!(svg.contains("share of the data"));
/// # Ok::<(), overdrive_sched::ScheduleError>(())
/// ```
pub fn plot_values(title: &str, what: &str, steps: u64, value: impl Fn(u64) -> f64) -> String {
    svg(title, steps, &step_marks(steps), &[(what, vec![points(steps).map(|step| (step, value(step))).collect()])])
}

/// Plots the values of a sweep in equal distances, with some of their labels below and a mark at one of them.
#[cfg(feature = "torch")]
pub(crate) fn plot_sweep(title: &str, what: &str, labels: &[String], values: &[f64], mark: Option<usize>) -> String {
    let steps = labels.len().saturating_sub(1);
    let every = labels.len().div_ceil(LABELS).max(1);
    let labels = labels.iter().enumerate().step_by(every).map(|(at, label)| (at as f64, label.clone()));
    let mut lines = vec![(0..).zip(values.iter().copied()).collect()];
    lines.extend(mark.map(|at| vec![(at as u64, 0.0), (at as u64, values[at])]));
    svg(title, steps as u64, &labels.collect::<Vec<_>>(), &[(what, lines)])
}

type Line = Vec<(u64, f64)>;

/// A position on an axis, and its label.
type Mark = (f64, String);

fn step_marks(steps: u64) -> Vec<Mark> {
    marks(ticks(steps as f64).0, steps as f64).collect()
}

/// All steps, or `POINTS` of them, including the first and the last.
fn points(steps: u64) -> impl Iterator<Item = u64> {
    let count = steps.min(POINTS);
    (0..=count).map(move |point| {
        let step = u128::from(point) * u128::from(steps) / u128::from(count.max(1));
        u64::try_from(step).unwrap_or(steps)
    })
}

fn svg(title: &str, steps: u64, below: &[Mark], panels: &[(&str, Vec<Line>)]) -> String {
    let height = HEIGHT * panels.len() as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
         height=\"{height}\" role=\"img\">\n<title>{}</title>\n{STYLE}\n",
        escaped(title)
    );
    for (number, (what, lines)) in panels.iter().enumerate() {
        let title = if number == 0 { format!("{title}: {what}") } else { (*what).to_owned() };
        panel(&mut svg, HEIGHT * number as f64, &title, (steps, below), lines);
    }
    svg.push_str("</svg>\n");
    svg
}

fn panel(svg: &mut String, top: f64, title: &str, (steps, below): (u64, &[Mark]), lines: &[Line]) {
    let highest = lines.iter().flatten().map(|point| point.1).filter(|it| it.is_finite()).fold(0.0, f64::max);
    let (y_tick, y_end) = ticks(highest);
    let x = |step: f64| LEFT + (WIDTH - LEFT - RIGHT) * step / (steps.max(1) as f64);
    let y = |value: f64| top + HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value / y_end).clamp(0.0, 1.0);
    put(svg, format_args!("<text class=\"title\" x=\"{LEFT}\" y=\"{:.1}\">{}</text>", top + 20.0, escaped(title)));
    for (value, label) in marks(y_tick, y_end) {
        let y = y(value);
        put(svg, format_args!("<path class=\"grid\" d=\"M{LEFT} {y:.1}H{:.1}\"/>", WIDTH - RIGHT));
        put(svg, format_args!("<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>", LEFT - 8.0, y + 4.0));
    }
    for (step, label) in below {
        let (x, y) = (x(*step), top + HEIGHT - BOTTOM + 18.0);
        put(svg, format_args!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">{label}</text>"));
    }
    for (number, line) in lines.iter().enumerate() {
        let _ = write!(svg, "<path class=\"line c{}\" d=\"", number % COLOURS);
        for (place, (step, value)) in line.iter().filter(|point| point.1.is_finite()).enumerate() {
            let command = if place == 0 { 'M' } else { 'L' };
            let _ = write!(svg, "{command}{:.1} {:.1}", x(*step as f64), y(*value));
        }
        svg.push_str("\"/>\n");
    }
}

/// The distance between axis marks (1, 2 or 5 times a power of ten), and the first mark that is not below the highest
/// value.
fn ticks(highest: f64) -> (f64, f64) {
    if highest <= 0.0 {
        return (1.0, 1.0);
    }
    // Slightly less, in case rounding has left the highest value just above a mark.
    let rough = highest / 5.0 * (1.0 - 1e-9);
    let power = 10f64.powf(rough.log10().floor());
    let tick = [1.0, 2.0, 5.0, 10.0].map(|it| it * power).into_iter().find(|it| *it >= rough).unwrap_or(rough);
    (tick, tick * (highest / tick - 1e-9).ceil())
}

/// Axis marks from 0 to the end, each with its label.
fn marks(tick: f64, end: f64) -> impl Iterator<Item = Mark> {
    let count = (end / tick + 1e-9).floor().clamp(0.0, 20.0) as u32;
    (0..=count).map(move |number| {
        let value = tick * f64::from(number);
        (value, label(value, tick))
    })
}

fn label(value: f64, tick: f64) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    if !(1e-3..1e6).contains(&tick) {
        // At most two digits, because a mark is a small multiple of the tick.
        return format!("{value:.1e}").replace(".0e", "e");
    }
    let digits = (-tick.log10().floor()).max(0.0) as usize;
    format!("{value:.digits$}")
}

fn put(svg: &mut String, line: std::fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    let _ = writeln!(svg, "{line}");
}

fn escaped(text: &str) -> String {
    let legal = text.chars().filter(|it| !it.is_control());
    legal.collect::<String>().replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ExponentialLr, OneCycleLr};

    #[test]
    fn marks_are_round_and_reach_the_highest_value() {
        let labels = |highest: f64| {
            let (tick, end) = ticks(highest);
            marks(tick, end).map(|mark| mark.1).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(labels(0.1), "0 0.02 0.04 0.06 0.08 0.10");
        assert_eq!(labels(0.3), "0 0.1 0.2 0.3");
        assert_eq!(labels(0.95), "0 0.2 0.4 0.6 0.8 1.0");
        assert_eq!(labels(100.0), "0 20 40 60 80 100");
        assert_eq!(labels(3e-4), "0 1e-4 2e-4 3e-4");
        assert_eq!(labels(0.0), "0 1");
    }

    #[test]
    fn a_picture_has_a_line_for_each_group_and_a_panel_for_the_momentum() -> Result<(), ScheduleError> {
        let lines = |svg: &str| svg.matches("class=\"line").count();
        assert_eq!(lines(&plot("a", ExponentialLr::new(0.9), &[0.1, 0.2, 0.3], 10)?), 3);
        let one_cycle = plot("b", OneCycleLr::new(0.1, 10), &[0.0], 10)?;
        assert_eq!(lines(&one_cycle), 2);
        assert!(one_cycle.contains("momentum"));
        assert!(plot("b", OneCycleLr::new(0.1, 10), &[0.0], 12).is_err(), "the schedule ends at step 10");
        Ok(())
    }

    #[test]
    fn many_steps_are_thinned_out_and_zero_steps_are_one_point() -> Result<(), ScheduleError> {
        let long = plot("a", ExponentialLr::new(0.999), &[0.1], 100_000)?;
        assert!(long.len() < 20_000, "{} bytes", long.len());
        assert_eq!(points(100_000).last(), Some(100_000));
        assert_eq!(points(0).collect::<Vec<_>>(), [0]);
        assert_eq!(points(3).collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert_eq!(points(u64::MAX).last(), Some(u64::MAX));
        Ok(())
    }

    #[test]
    fn a_title_cannot_break_the_picture() {
        let svg = plot_values("<a> & \u{1} b", "c", 3, |_| f64::NAN);
        assert!(svg.contains("<title>&lt;a&gt; &amp;  b</title>") && !svg.contains("NaN"));
    }
}
