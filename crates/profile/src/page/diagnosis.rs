//! The diagnosis, at the top of the page.

use std::fmt::Write;

use super::text::{escape, percent, prose, time};
use crate::{Bottleneck, Diagnosis, Finding};

/// The page's headline.
pub(super) fn headline(diagnosis: &Diagnosis) -> String {
    match diagnosis.bound_by {
        Some(bound @ (Bottleneck::Compute | Bottleneck::MemoryBandwidth)) if diagnosis.findings.is_empty() => {
            format!("Bound by {bound}: a healthy run")
        }
        Some(bound) => format!("Bound by {bound}"),
        None => "The record is not enough to tell what bounds this run".to_owned(),
    }
}

/// The findings, in the diagnosis's order.
pub(super) fn findings(diagnosis: &Diagnosis) -> String {
    if diagnosis.findings.is_empty() {
        let text = match diagnosis.bound_by {
            Some(_) => "Nothing was found that could be improved.",
            None => "Nothing was found; the notes at the end list what could not be judged.",
        };
        return format!("<p class=\"quiet\">{text}</p>");
    }
    diagnosis.findings.iter().map(finding).collect()
}

fn finding(finding: &Finding) -> String {
    let gain = match finding.bottleneck {
        Bottleneck::MemoryGrowth => "it will end the run".to_owned(),
        _ if finding.share == 0.0 => "its cost is not known".to_owned(),
        _ => format!(
            "without it up to <b>{:.2}\u{d7}</b> as fast: {} of a step, {}",
            finding.speedup_bound(),
            escape(&time(finding.seconds_per_step)),
            percent(finding.share),
        ),
    };
    let name = finding.bottleneck.name();
    let (first, rest) = name.split_at(name.chars().next().map_or(0, char::len_utf8));
    let mut out = format!(
        "<article class=\"finding\"><header><h3>{}{}</h3><span>{gain}</span></header>",
        escape(&first.to_uppercase()),
        escape(rest),
    );
    let op = finding.op.as_ref().map(|op| format!("operator <code>{}</code>", escape(op)));
    let scope = finding.scope.as_ref().map(|scope| format!("scope <code>{}</code>", escape(scope)));
    let places: Vec<String> = op.into_iter().chain(scope).collect();
    // Writing to a string cannot fail.
    if !places.is_empty() {
        let _ = write!(out, "<p class=\"where\">In {}</p>", places.join(", "));
    }
    if !finding.evidence.is_empty() {
        let lines: String = finding.evidence.iter().map(|line| format!("<li>{}</li>", prose(line))).collect();
        let _ = write!(out, "<ul>{lines}</ul>");
    }
    let _ = write!(out, "<p class=\"remedy\"><b>Remedy:</b> {}</p></article>", prose(&finding.remedy));
    out
}
