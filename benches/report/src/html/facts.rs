//! The small print: machine, versions, data, options, and how the numbers were taken.

use super::{escape, paragraphs};
use crate::Report;
use crate::report::GUARD_POINTS;
use crate::text::bytes;

/// The line above the headline.
pub fn summary(report: &Report) -> String {
    let setting = &report.setting;
    let quick = if setting.config.quick { "a quick look" } else { "a full run" };
    let on = setting.machine.gpu.as_deref().unwrap_or(&setting.machine.cpu);
    format!("{} \u{b7} {on} \u{b7} {quick} \u{b7} {}", setting.dataset.name, setting.measured_at)
}

/// How it was measured: what holds for every report, then what the bench says of its own clock.
pub fn method(report: &Report) -> String {
    let config = &report.setting.config;
    let general = [
        format!(
            "Every technique trained the same model from the same seed on the same data in the same order, {} epochs, \
             {} times. Techniques took turns within each repetition, so that a slow spell of the machine met all of \
             them.",
            config.epochs, config.repeat,
        ),
        "Times are medians, with the fastest and the slowest repetition beside them. A speed-up is the median of the \
         ratios within each repetition, not the ratio of two medians."
            .to_owned(),
        format!(
            "Accuracy is measured on images that were not trained on; a technique has kept it if it fell by no more \
             than {GUARD_POINTS} percentage points."
        ),
    ];
    paragraphs(general.iter().chain(&report.setting.method).map(String::as_str))
}

/// Names and values, as the entries of a list.
pub fn list(report: &Report) -> String {
    let setting = &report.setting;
    let (machine, config, data) = (&setting.machine, &setting.config, &setting.dataset);
    let mut entries = vec![
        ("Processor", machine.cpu.clone()),
        ("Cores", format!("{}, {} threads computing", machine.cores, config.threads)),
        ("Instructions", machine.cpu_flags.join(", ")),
        ("Memory", bytes(machine.memory_bytes)),
        ("GPU", machine.gpu.clone().unwrap_or_else(|| "none".to_owned())),
        ("System", machine.os.clone()),
    ];
    entries.extend(setting.versions.iter().map(|(name, version)| (name.as_str(), version.clone())));
    entries.extend([
        ("Data", format!("{}, {} training and {} test images", data.name, data.train, data.test)),
        ("SHA-256", data.sha256.clone()),
        ("Model", config.model.clone()),
        ("Optimizer", config.optimizer.clone()),
        ("Batch", format!("{} images, seed {}", config.batch_size, config.seed)),
    ]);
    let entry = |(name, value): (&str, String)| {
        let value = if value.is_empty() { "\u{2013}" } else { &value };
        format!("<div><dt>{}</dt><dd>{}</dd></div>", escape(name), escape(value))
    };
    entries.into_iter().map(entry).collect()
}
