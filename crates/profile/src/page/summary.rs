//! The summary: what ran where, and how fast.

use std::fmt::Write;

use super::section;
use super::text::{bytes, escape, large, percent, plural, time, utc};
use crate::RunProfile;

/// The program's name, without its folder.
pub(super) fn program(run: &RunProfile) -> String {
    let name = run.command.first().map_or("", String::as_str);
    let name = name.rsplit('/').next().unwrap_or_default();
    if name.is_empty() { "a program without a name".to_owned() } else { name.to_owned() }
}

/// The line above the headline.
pub(super) fn line(run: &RunProfile) -> String {
    let machine = &run.machine;
    let mut parts = vec![format!("<code>{}</code>", escape(&command(run)))];
    if run.world_size > 1 {
        parts.push(plural(run.world_size, "rank"));
    }
    if let Some(gpu) = &machine.gpu {
        parts.push(escape(&format!("{gpu} ({})", machine.device)));
    }
    if machine.cpus > 0 {
        let threads = plural(u64::from(machine.torch_threads), "thread");
        parts.push(format!("{}, {threads} per operator", plural(u64::from(machine.cpus), "CPU")));
    }
    parts.extend([&machine.host, &machine.system].into_iter().filter(|text| !text.is_empty()).map(|text| escape(text)));
    if run.unix_seconds > 0.0 {
        parts.push(utc(run.unix_seconds));
    }
    parts.join(" · ")
}

fn command(run: &RunProfile) -> String {
    let mut words = vec![program(run)];
    words.extend(run.command.iter().skip(1).cloned());
    words.join(" ")
}

/// The main figures.
pub(super) fn figures(run: &RunProfile) -> String {
    let Some(steps) = run.steps.as_ref().filter(|steps| steps.steps > 0) else {
        return section(
            "No step was timed",
            "The run ended during the timer's warm-up, or never called `step`. The rest of the page shows what was \
             recorded nevertheless.",
            "",
        );
    };
    let mut figures = vec![
        ("Median step", time(steps.median_seconds)),
        ("p95 step", time(steps.p95_seconds)),
        ("Samples per second", rate(steps.samples_per_second)),
    ];
    if let Some(tokens) = steps.tokens_per_second {
        figures.push(("Tokens per second", rate(tokens)));
    }
    if let Some(mfu) = steps.mfu {
        figures.push(("MFU", percent(mfu)));
    }
    figures.push(("Steps timed", steps.steps.to_string()));
    if let Some(peak) = peak_resident_bytes(run) {
        figures.push(("Peak resident memory", bytes(peak)));
    }
    if let Some(peak) = peak_gpu_bytes(run) {
        figures.push(("Peak GPU memory", bytes(peak)));
    }
    let mut out = String::from("<dl class=\"figures\">");
    for (name, value) in figures {
        // Writing to a string cannot fail.
        let _ = write!(out, "<div><dt>{name}</dt><dd>{}</dd></div>", escape(&value));
    }
    out + "</dl>\n"
}

/// A rate without a unit.
fn rate(value: f64) -> String {
    if value < 1e5 { format!("{value:.1}") } else { large(value).trim_end().to_owned() }
}

/// The peak resident memory of the process, in bytes.
pub(crate) fn peak_resident_bytes(run: &RunProfile) -> Option<f64> {
    let resident = run.samples.iter().filter_map(|sample| sample.process.as_ref());
    resident.map(|process| process.resident_memory_bytes).max().map(|bytes| bytes as f64)
}

/// The peak memory in use on any GPU, in bytes.
pub(crate) fn peak_gpu_bytes(run: &RunProfile) -> Option<f64> {
    let used = run.samples.iter().flat_map(|sample| &sample.gpus).filter_map(|gpu| gpu.memory_used_bytes);
    used.max().map(|bytes| bytes as f64)
}
