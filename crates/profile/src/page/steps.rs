//! The steps: a timeline, and where their time goes.

use std::fmt::Write;

use super::section;
use super::table::{Cell, Column, numbers, table, words};
use super::text::{count, escape, milliseconds, percent, plural, tick, ticks, time};
use crate::{DeviceReport, Phase, PhaseTimes, ProfiledSteps, RunProfile, StepTimes};

/// The maximum number of bars; with more steps, several share a bar.
const MOST_BARS: usize = 120;
const HEIGHT: f64 = 190.0;
/// A bar of more than this many medians is cut off, so that the others stay readable.
const TALLEST: f64 = 4.0;

/// The class of a phase in the style sheet.
pub(super) fn class(phase: Phase) -> &'static str {
    match phase {
        Phase::DataWait => "data",
        Phase::HostToDevice => "copy",
        Phase::Forward => "forward",
        Phase::Backward => "backward",
        Phase::Optimizer => "optimizer",
        Phase::Communication => "communication",
        Phase::Other => "other",
    }
}

/// The timeline of the steps.
pub(super) fn timeline(run: &RunProfile) -> String {
    let on_host = bars(&run.step_times, |step| Some(&step.host_seconds));
    let on_device = bars(&run.step_times, |step| step.device_seconds.as_ref());
    let Some(on_host) = on_host else {
        return section("Steps", "No step was recorded.", "");
    };
    let several = run.step_times.len().div_ceil(MOST_BARS);
    let explanation = match several {
        1 => "Each bar is a step.".to_owned(),
        _ => format!("Each bar is the mean of {several} steps."),
    };
    let profiled = run.step_times.iter().filter(|step| step.is_profiled).count() as u64;
    let explanation = match profiled {
        0 => explanation,
        _ => format!(
            "{explanation} Grey, not counted: {} under the profiler, or while its trace was written.",
            plural(profiled, "step")
        ),
    };
    let legend: String = Phase::ALL
        .into_iter()
        .filter(|phase| run.step_times.iter().any(|step| step.host_seconds.get(*phase as usize) > Some(&0.0)))
        .map(|phase| format!("<span><i class=\"box {}\"></i>{phase}</span>", class(phase)))
        .collect();
    let figure = |title: &str, bars: &str| format!("<figure><figcaption><b>{title}</b></figcaption>{bars}</figure>");
    let charts = match on_device {
        Some(on_device) => figure("On the host", &on_host) + &figure("On the device", &on_device),
        None => format!("<figure>{on_host}</figure>"),
    };
    section("Steps", &explanation, &format!("<p class=\"legend\">{legend}</p>{charts}"))
}

/// One or several steps.
struct Bar {
    first: u64,
    last: u64,
    /// Seconds of the mean step by phase. None if all steps were profiled, or their times are unknown.
    phases: Option<[f64; Phase::ALL.len()]>,
}

impl Bar {
    fn of(steps: &[StepTimes], seconds: impl Fn(&StepTimes) -> Option<&Vec<f64>>) -> Option<Self> {
        let timed: Vec<&Vec<f64>> = steps.iter().filter(|step| !step.is_profiled).filter_map(seconds).collect();
        let mean = |phase: usize| {
            let times = timed.iter().filter_map(|phases| phases.get(phase)).filter(|seconds| seconds.is_finite());
            times.map(|seconds| seconds.max(0.0)).sum::<f64>() / timed.len() as f64
        };
        Some(Self {
            first: steps.first()?.step,
            last: steps.last()?.step,
            phases: (!timed.is_empty()).then(|| std::array::from_fn(mean)),
        })
    }

    fn total(&self) -> Option<f64> {
        self.phases.map(|phases| phases.iter().sum())
    }

    fn tooltip(&self) -> String {
        let steps = match self.first == self.last {
            true => format!("step {}", self.first),
            false => format!("steps {} to {}", self.first, self.last),
        };
        let Some(phases) = self.phases else { return format!("{steps}: under the profiler") };
        let mut out = format!("{steps}: {}", time(phases.iter().sum()));
        for (phase, seconds) in Phase::ALL.into_iter().zip(phases).filter(|(_, seconds)| *seconds > 0.0) {
            // Writing to a string cannot fail.
            let _ = write!(out, "\n{phase} {}", time(seconds));
        }
        out
    }
}

/// The bars of one clock. None if it has no step.
fn bars(steps: &[StepTimes], seconds: impl Fn(&StepTimes) -> Option<&Vec<f64>>) -> Option<String> {
    let several = steps.len().div_ceil(MOST_BARS).max(1);
    let bars: Vec<Bar> = steps.chunks(several).filter_map(|steps| Bar::of(steps, &seconds)).collect();
    let mut totals: Vec<f64> = bars.iter().filter_map(Bar::total).collect();
    totals.sort_by(f64::total_cmp);
    let median = *totals.get(totals.len() / 2)?;
    let tallest = totals.last().map_or(0.0, |last| last.min(TALLEST * median));
    let tallest = if tallest > 0.0 { tallest } else { 1.0 };
    let y = |seconds: f64| HEIGHT * (1.0 - seconds / tallest);
    let mut out =
        format!("<svg class=\"plot\" height=\"{}\" role=\"img\" aria-label=\"The time of each step\">", HEIGHT + 20.0);
    let marks = ticks(tallest, 4.0);
    for mark in &marks {
        let _ = write!(out, "<line class=\"grid\" x1=\"0\" x2=\"100%\" y1=\"{0:.1}\" y2=\"{0:.1}\"/>", y(*mark));
    }
    let place = 100.0 / bars.len() as f64;
    for (number, bar) in bars.iter().enumerate() {
        draw(&mut out, bar, place * number as f64, place * 0.86, y);
    }
    for mark in marks.iter().filter(|mark| **mark > 0.0) {
        let _ =
            write!(out, "<text x=\"-8\" y=\"{:.1}\" text-anchor=\"end\">{}</text>", y(*mark) + 4.0, tick(&time(*mark)));
    }
    axis(&mut out, &bars, place);
    Some(out + "</svg>")
}

fn draw(out: &mut String, bar: &Bar, x: f64, width: f64, y: impl Fn(f64) -> f64) {
    let _ = write!(out, "<g class=\"bin\"><title>{}</title>", escape(&bar.tooltip()));
    let place = format!("x=\"{x:.3}%\" width=\"{width:.3}%\"");
    match bar.phases {
        None => {
            let _ = write!(out, "<rect class=\"profiled\" {place} height=\"{HEIGHT}\"/>");
        }
        Some(phases) => {
            let mut below = 0.0;
            for (phase, seconds) in Phase::ALL.into_iter().zip(phases) {
                let (top, bottom) = (y(below + seconds).max(0.0), y(below));
                below += seconds;
                if bottom > top {
                    let height = bottom - top;
                    let class = class(phase);
                    let _ = write!(out, "<rect class=\"{class}\" {place} y=\"{top:.2}\" height=\"{height:.2}\"/>");
                }
            }
            let is_cut = y(below) < -0.5;
            if is_cut {
                let _ = write!(out, "<rect class=\"cut\" {place} y=\"-5\" height=\"3\"/>");
            }
        }
    }
    *out += "</g>";
}

/// Draws the numbers of steps below the bars.
fn axis(out: &mut String, bars: &[Bar], place: f64) {
    let labels = bars.len().min(6);
    for label in 0..labels {
        let at = label * (bars.len() - 1) / labels.saturating_sub(1).max(1);
        let x = place * (at as f64 + 0.43);
        let anchor = match x {
            x if x < 4.0 => "start",
            x if x > 96.0 => "end",
            _ => "middle",
        };
        let name = if label == 0 { "step " } else { "" };
        let (first, y) = (bars[at].first, HEIGHT + 15.0);
        let _ = write!(out, "<text x=\"{x:.2}%\" y=\"{y}\" text-anchor=\"{anchor}\">{name}{first}</text>");
    }
}

/// The share of each phase.
pub(super) fn phases(run: &RunProfile) -> String {
    let Some(steps) = run.steps.as_ref().filter(|steps| steps.steps > 0) else { return String::new() };
    let mut bar = String::from("<svg width=\"100%\" height=\"26\" role=\"img\" aria-label=\"Shares of the phases\">");
    let mut at = 0.0;
    for report in &steps.phases {
        let share = 100.0 * report.share.clamp(0.0, 1.0);
        let label = format!("{}: {}", report.phase, percent(report.share));
        let _ = write!(
            bar,
            "<g class=\"bin\"><title>{label}</title><rect class=\"{}\" x=\"{at:.3}%\" width=\"{share:.3}%\" height=\"26\"/></g>",
            class(report.phase),
        );
        at += share;
    }
    bar += "</svg>";
    // Phases without time are left out: the program does not mark them.
    let rows = steps.phases.iter().filter(|report| report.share > 0.0).map(|report| {
        let name = format!("<i class=\"box {}\"></i>{}", class(report.phase), report.phase);
        let mut cells = vec![
            Cell::html(name),
            Cell::number(milliseconds(report.median_seconds), report.median_seconds),
            Cell::number(milliseconds(report.p95_seconds), report.p95_seconds),
            Cell::number(percent(report.share), report.share),
        ];
        cells.extend(steps.device.iter().flat_map(|device| device_cells(device, report.phase)));
        cells.extend(run.profiled.iter().flat_map(|profiled| profiled_cells(profiled, report.phase)));
        cells
    });
    let mut columns = vec![words("Phase"), numbers("Median, ms"), numbers("p95, ms"), numbers("Share")];
    if steps.device.is_some() {
        columns.extend([numbers("On the device, ms"), numbers("Share there")]);
    }
    if run.profiled.is_some() {
        columns.extend(profiled_columns());
    }
    let explanation = match (&steps.device, &run.profiled) {
        (Some(_), _) => "On the host, which only launches work for the device; and on the device.",
        (None, Some(_)) => "Operators are those of the profiled steps.",
        _ => "",
    };
    section("Where each step's time goes", explanation, &(bar + &table("Phases", &columns, rows.collect())))
}

fn device_cells(device: &DeviceReport, phase: Phase) -> [Cell; 2] {
    let report = device.phase(phase);
    [Cell::maybe(report.map(|it| it.median_seconds), milliseconds), Cell::maybe(report.map(|it| it.share), percent)]
}

fn profiled_columns() -> [Column; 2] {
    [numbers("Operators"), numbers("Time in operators")]
}

fn profiled_cells(profiled: &ProfiledSteps, phase: Phase) -> [Cell; 2] {
    let times = profiled.phase(phase);
    let within = |times: &PhaseTimes| (times.seconds > 0.0).then(|| times.operator_seconds / times.seconds);
    [Cell::maybe(times.map(|it| it.operators), count), Cell::maybe(times.and_then(within), percent)]
}
