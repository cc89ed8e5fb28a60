//! What to use on a machine and why, in words, from nothing but the measured rows.

use crate::report::GUARD_POINTS;
use crate::text::{accuracy, bytes, list, percent, points, seconds, times};
use crate::{DeviceKind, Machine, Row, Technique};

/// Speeds closer than this share are told apart by noise alone.
const NOISE: f64 = 0.03;

/// Repetitions of one row that differ by more than this factor say that something else was using the machine.
const DISTURBED: f64 = 1.5;

/// A baseline that waits for data less than this share of its time has nothing to gain from faster data.
const LITTLE_WAIT: f64 = 0.1;

/// The advice: a headline, then a sentence an item. Pure: the same rows give the same words.
pub fn advise(rows: &[Row], machine: &Machine) -> Vec<String> {
    let on = |device| rows.iter().filter(|row| row.device == device).collect::<Vec<&Row>>();
    let (cuda, cpu) = (on(DeviceKind::Cuda), on(DeviceKind::Cpu));
    let both = !cuda.is_empty() && !cpu.is_empty();
    let mut lines = Vec::new();
    for (place, rows) in [("On the GPU: ", cuda), ("On the processor: ", cpu)] {
        let said = advise_on(&rows, machine);
        let place = if both { place } else { "" };
        lines
            .extend(said.into_iter().enumerate().map(|(i, line)| if i == 0 { place.to_owned() + &line } else { line }));
    }
    lines
}

/// The advice for one device.
fn advise_on(rows: &[&Row], machine: &Machine) -> Vec<String> {
    let find = |technique| rows.iter().copied().find(|row| row.technique == technique);
    let Some(baseline) = find(Technique::Baseline) else { return Vec::new() };
    let best = pick(rows.iter().copied());
    let best_of_files = pick(rows.iter().copied().filter(|row| !row.technique.needs_one_tensor()));

    // Advice from disturbed times would be noise in the voice of a measurement.
    if let Some(row) = rows.iter().copied().find(|row| row.spread().high > row.spread().low * DISTURBED) {
        return disturbed(row);
    }
    let mut lines = vec![headline(best, best_of_files)];
    lines.extend(best_of_files.or(best).map(|advised| why(advised, baseline)));
    lines.extend(best.zip(best_of_files).and_then(|(best, files)| one_tensor(best, files)));
    lines.extend(find(Technique::InMemory).and_then(|tensor| caching(tensor, rows)));
    lines.extend(no_help(rows, baseline, machine));
    lines.extend(find(Technique::Combined).zip(best_of_files).and_then(|(row, best)| combined(row, best)));
    lines.extend(find(Technique::Accumulate).and_then(|row| memory(row, baseline)));
    lines.extend(rows.iter().filter(|row| !row.kept_accuracy).map(|row| lost(row)));
    if baseline.seconds.len() < 3 {
        lines.push("Measured fewer than three times: take the times as a first look.".to_owned());
    }
    lines
}

/// The fastest row that kept accuracy and clearly gained; of those that noise alone tells apart, the simplest, which is
/// the first in the order of techniques.
fn pick<'a>(rows: impl Iterator<Item = &'a Row>) -> Option<&'a Row> {
    let gained: Vec<&Row> = rows.filter(|row| row.kept_accuracy && effect(row) == Effect::Faster).collect();
    let fastest = gained.iter().map(|row| row.speedup).fold(0.0, f64::max);
    gained.into_iter().filter(|row| row.speedup >= fastest * (1.0 - NOISE)).min_by_key(|row| row.technique)
}

#[derive(PartialEq)]
enum Effect {
    Faster,
    Same,
    Slower,
}

/// What a row did to the time: it must exceed the noise, in every repetition.
fn effect(row: &Row) -> Effect {
    match row {
        row if row.speedup >= 1.0 + NOISE && row.speedup_low > 1.0 => Effect::Faster,
        row if row.speedup <= 1.0 - NOISE && row.speedup_high < 1.0 => Effect::Slower,
        _ => Effect::Same,
    }
}

/// In place of advice, where the times cannot carry any.
fn disturbed(row: &Row) -> Vec<String> {
    let (low, high) = (seconds(row.spread().low), seconds(row.spread().high));
    vec![
        "No advice: the machine was too disturbed to compare times. Measure again when it is quiet.".to_owned(),
        format!(
            "The same run of {} took from {low} s to {high} s, so something else was using the processor.",
            row.technique
        ),
    ]
}

/// What to use, short enough for a title.
fn headline(best: Option<&Row>, best_of_files: Option<&Row>) -> String {
    match (best, best_of_files) {
        (None, _) => "Keep the baseline: nothing measured here made it faster and kept its accuracy.".to_owned(),
        (Some(best), None) => {
            format!("Use {} where the data fits as one tensor: {}.", best.technique, gain(best))
        }
        (Some(_), Some(files)) => format!("Use {}: {}.", files.technique, gain(files)),
    }
}

fn gain(row: &Row) -> String {
    format!("{} as fast as baseline", times(row.speedup))
}

/// What the advised row did, and where its time comes from.
fn why(best: &Row, baseline: &Row) -> String {
    let what = format!(
        "{} s went down to {} s, with accuracy at {} ({} points)",
        seconds(baseline.seconds_median),
        seconds(best.seconds_median),
        accuracy(best.accuracy),
        points(best.accuracy_delta_points),
    );
    let (before, after) = (percent(baseline.data_wait_fraction), percent(best.data_wait_fraction));
    if baseline.data_wait_fraction < LITTLE_WAIT {
        return format!("{what}. Data is not what holds this machine back: baseline spent {before} of its time on it.");
    }
    format!("{what}: baseline spent {before} of its time on data, {} spends {after}.", best.technique)
}

/// The row that is better still, but only for data that fits as one tensor.
fn one_tensor(best: &Row, files: &Row) -> Option<String> {
    let better = if best.speedup > files.speedup * (1.0 + NOISE) { "is faster still" } else { "does as well" };
    let (name, gain) = (best.technique, gain(best));
    name.needs_one_tensor().then(|| format!("Where the whole set fits as one tensor, {name} {better}: {gain}."))
}

/// How caching compares with the whole set in one tensor, which is what a user of a small set would do anyway.
fn caching(tensor: &Row, rows: &[&Row]) -> Option<String> {
    let cached = rows.iter().filter(|row| matches!(row.technique, Technique::Cache | Technique::CachePrefetch));
    let fastest = cached.min_by(|a, b| a.seconds_median.total_cmp(&b.seconds_median))?;
    let times = format!("{} s against {} s", seconds(fastest.seconds_median), seconds(tensor.seconds_median));
    let name = fastest.technique;
    Some(if fastest.seconds_median >= tensor.seconds_median * (1.0 - NOISE) {
        format!("Caching gains nothing over in_memory, one tensor, where the data fits as one: {name} took {times}.")
    } else if name == Technique::CachePrefetch {
        format!("{name} was faster even than in_memory ({times}): its batches are ready before they are asked for.")
    } else {
        format!("{name} was faster even than in_memory ({times}), which is unexpected: repeat the measurement.")
    })
}

/// What did not help and why; rows of which the same is to be said share a sentence.
fn no_help(rows: &[&Row], baseline: &Row, machine: &Machine) -> Vec<String> {
    let mut said: Vec<(&str, Option<&str>, Vec<String>)> = Vec::new();
    // Accumulation is for memory, and what holds back everything together is one of its parts.
    let alone = |row: &&Row| !matches!(row.technique, Technique::Accumulate | Technique::Combined);
    for row in rows.iter().copied().filter(|row| !row.is_baseline()).filter(alone) {
        let what = match effect(row) {
            Effect::Faster => continue,
            Effect::Same => "made no clear difference",
            Effect::Slower => "took longer than baseline",
        };
        let (reason, name) = (reason(row, baseline, machine), format!("{} ({})", row.technique, times(row.speedup)));
        match said.iter_mut().find(|(other, because, _)| (*other, *because) == (what, reason)) {
            Some((_, _, names)) => names.push(name),
            None => said.push((what, reason, vec![name])),
        }
    }
    let sentence = |(what, reason, names): (&str, Option<&str>, Vec<String>)| {
        format!("{} {what}{}.", list(names), reason.map(|reason| format!(": {reason}")).unwrap_or_default())
    };
    said.into_iter().map(sentence).collect()
}

/// Why a row did not gain, where something measured tells.
fn reason(row: &Row, baseline: &Row, machine: &Machine) -> Option<&'static str> {
    match (row.technique, row.device) {
        (Technique::AmpBf16, DeviceKind::Cpu) if !machine.has_bf16_hardware() => {
            Some("this processor has no bfloat16 hardware (avx512_bf16 or amx_bf16) and emulates it")
        }
        (Technique::AmpBf16 | Technique::AmpFp16 | Technique::Tf32, _) if baseline.data_wait_fraction > 0.5 => {
            Some("most of baseline's time goes to data, which precision does not touch")
        }
        (Technique::AmpBf16 | Technique::AmpFp16 | Technique::Tf32, _) => {
            Some("a model this small likely has too little arithmetic to win back what it costs")
        }
        _ if baseline.data_wait_fraction < LITTLE_WAIT => Some("little time was spent on data to begin with"),
        _ => None,
    }
}

/// Everything together against the best of its parts.
fn combined(row: &Row, best: &Row) -> Option<String> {
    let (ours, other, more) = (times(row.speedup), best.technique, times(best.speedup));
    (row.speedup < best.speedup * (1.0 - NOISE)).then(|| {
        format!("combined reached {ours}, less than {other} alone ({more}): it carries along what did not help.")
    })
}

/// What accumulation is for.
fn memory(row: &Row, baseline: &Row) -> Option<String> {
    let held = |row: &Row| row.peak_device_bytes.or(row.peak_rss_bytes);
    let (ours, theirs) = (held(row)?, held(baseline)?);
    let numbers = format!("{} against {}", bytes(Some(ours)), bytes(Some(theirs)));
    let speed = times(row.speedup);
    Some(if (ours as f64) < theirs as f64 * (1.0 - NOISE) {
        format!("accumulate is for memory, not time: {numbers} at the peak, at {speed} of baseline's speed.")
    } else {
        format!(
            "accumulate saved no memory with a model this small ({numbers} at the peak, {speed} of baseline's speed)."
        )
    })
}

fn lost(row: &Row) -> String {
    let fallen = points(row.accuracy_delta_points);
    format!("{} changed accuracy by {fallen} points, beyond the {GUARD_POINTS} allowed: not advised.", row.technique)
}

/// The names of the rows that lost accuracy, as a list in words; empty where all kept it.
pub(crate) fn fallen(rows: &[Row]) -> String {
    list(rows.iter().filter(|row| !row.kept_accuracy).map(|row| format!("{} ({})", row.technique, row.device)))
}

#[cfg(test)]
#[path = "advice_tests.rs"]
mod tests;
