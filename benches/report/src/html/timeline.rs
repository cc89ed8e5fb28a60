//! A timeline of a few steps by phase, plain tch above combined, on one scale; below it, what would speed up combined
//! further.

use std::fmt::Write;

use super::{bars::REACH, escape, paragraphs};
use crate::report::{WorkloadReport, first_steps};
use crate::text::seconds;
use crate::{Contender, Span};

/// How many steps are shown.
const STEPS: usize = 3;

/// A workload's timelines under a heading; empty if none was recorded.
pub fn section(report: &WorkloadReport) -> String {
    let all = &report.measurements;
    let lines: Vec<(Contender, &[Span])> = [Contender::Tch, Contender::Combined]
        .into_iter()
        .filter_map(|contender| Some((contender, first_steps(&all.of(contender)?.timeline, STEPS))))
        .filter(|(_, spans)| !spans.is_empty())
        .collect();
    let whole =
        lines.iter().flat_map(|(_, spans)| spans.iter()).map(|span| span.start + span.seconds).fold(0.0, f64::max);
    if whole <= 0.0 {
        return String::new();
    }
    let drawn: String = lines.iter().map(|(contender, spans)| line(*contender, spans, whole)).collect();
    let legend: String =
        [("data wait", "data-wait"), ("forward", "forward"), ("backward", "backward"), ("optimizer", "optimizer")]
            .map(|(name, class)| format!("<span><i class=\"{class}\"></i>{name}</span>"))
            .concat();
    let next = match all.next.is_empty() {
        true => String::new(),
        false => {
            let lines = paragraphs(all.next.iter().map(String::as_str));
            format!(
                "<h3>What would speed up Overdrive further, according to its diagnosis</h3>\
                 <div class=\"next\">{lines}</div>"
            )
        }
    };
    format!(
        "<h3>{STEPS} steps by phase</h3><p class=\"legend\">{legend}</p>\
         <div class=\"bars\">{drawn}</div>{next}"
    )
}

fn line(contender: Contender, spans: &[Span], whole: f64) -> String {
    let end = spans.last().map_or(0.0, |span| span.start + span.seconds);
    let title = contender.title();
    let mut out = format!(
        "<div class=\"bar\"><div class=\"name\"><b>{title}</b></div>\
         <svg width=\"100%\" height=\"22\" role=\"img\" aria-label=\"{}\">",
        escape(&format!("{title}: {STEPS} steps in {} s", seconds(end))),
    );
    for span in spans {
        // Writing to a string cannot fail.
        let _ = write!(
            out,
            "<rect class=\"{}\" x=\"{:.3}%\" width=\"{:.3}%\" y=\"3\" height=\"16\"><title>{}: {} s</title></rect>",
            span.phase.replace(' ', "-"),
            REACH * span.start / whole,
            REACH * span.seconds / whole,
            escape(&span.phase),
            seconds(span.seconds),
        );
    }
    let _ = write!(out, "</svg><div class=\"value\"><b>{} s</b></div></div>", seconds(end));
    out
}
