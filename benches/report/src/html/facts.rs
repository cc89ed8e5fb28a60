//! The page's list of facts: machine, versions and options.

use super::escape;
use crate::Report;
use crate::text::{bytes, list as in_words};

/// The line above the headline.
pub fn summary(report: &Report) -> String {
    let setting = &report.setting;
    let on = setting.machine.gpu.as_deref().unwrap_or(&setting.machine.cpu);
    format!(
        "Technique benchmark \u{b7} {on}, {} cores \u{b7} {} \u{b7} {}",
        setting.machine.cores, setting.size, setting.measured_at
    )
}

/// Names and values, as the entries of a list.
pub fn list(report: &Report) -> String {
    let setting = &report.setting;
    let machine = &setting.machine;
    let mut entries = vec![
        ("Processor", machine.cpu.clone()),
        ("Cores", format!("{}, at most {} threads compute", machine.cores, setting.threads)),
        ("Instructions", machine.cpu_flags.join(", ")),
        ("Memory", bytes(machine.memory_bytes)),
        ("GPU", machine.gpu.clone().unwrap_or_else(|| "none".to_owned())),
        ("System", machine.os.clone()),
    ];
    entries.extend(setting.versions.iter().map(|(name, version)| (name.as_str(), version.clone())));
    entries.extend(setting.run_seconds.map(|it| ("The run took", format!("{:.0} min", it / 60.0))));
    entries.push(("Rounds", setting.rounds.to_string()));
    entries.push(("Seeds", in_words(&setting.seeds)));
    let entry = |(name, value): (&str, String)| {
        let value = if value.is_empty() { "\u{2013}" } else { &value };
        format!("<div><dt>{}</dt><dd>{}</dd></div>", escape(name), escape(value))
    };
    entries.into_iter().map(entry).collect()
}
