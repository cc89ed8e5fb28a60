//! Compares two runs: which times changed by more than noise.

mod display;
mod interval;

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;

use self::interval::{Estimate, Series, Z, Z_OF_TWO};
use crate::page::summary::{peak_gpu_bytes, peak_resident_bytes};
use crate::run::NO_STEP_TIMER;
use crate::{Phase, ProfiledSteps, RunProfile, StepTimes};

/// Noise cannot be estimated from fewer steps.
const LEAST_STEPS: usize = 16;
/// Operators whose share of a step changes by less are not listed.
const LEAST_CHANGE: f64 = 0.001;
/// Rows of the table of operators.
const MOST_OPS: usize = 15;

/// Two runs, compared. Made by [`Comparison::of`].
///
/// A ratio's interval covers the variation between the steps within each run, which may be autocorrelated. Repeated
/// runs of one program differ for further reasons.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Comparison {
    /// The version of this format: 1.
    pub schema: u32,
    /// The confidence level of each single interval.
    pub confidence: f64,
    /// How many steps of each run were compared.
    pub steps: [u64; 2],
    /// The median step, and the phases that take any time.
    pub times: Vec<ComparedTime>,
    /// Samples per second, before and after. None if no samples were counted, or if they took no time.
    pub samples_per_second: Option<[f64; 2]>,
    /// The time for one sample, from all steps. None if no samples were counted.
    pub sample_time: Option<ComparedTime>,
    /// Profiled operators whose share of a step changed most.
    pub ops: Vec<ComparedOp>,
    /// How many profiled steps of each run these come from.
    pub profiled_steps: [u64; 2],
    /// Memory.
    pub memory: Vec<ComparedBytes>,
    /// Caveats for the reader.
    pub notes: Vec<String>,
}

/// A time in both runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ComparedTime {
    /// What takes the time: `step`, or a phase.
    pub name: String,
    /// Whether it is timed on the device, rather than on the host.
    pub is_on_device: bool,
    /// Seconds before.
    pub before_seconds: f64,
    /// Seconds after.
    pub after_seconds: f64,
    /// After divided by before; below 1 is faster. None if one of them is 0, or if they are not comparable.
    pub ratio: Option<f64>,
    /// The interval of the ratio. None if the times are not comparable, if there are too few steps, or if a time varies
    /// so much that it may be 0; then the verdict is based on the difference.
    pub ratio_interval: Option<[f64; 2]>,
    /// What the interval means.
    pub verdict: Verdict,
}

/// How a time changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It got shorter.
    Faster,
    /// It got longer.
    Slower,
    /// It may not have changed.
    WithinNoise,
    /// There are too few steps to tell.
    TooFewSteps,
    /// The time means different things in the two runs.
    NotComparable,
}

/// An operator in both runs, as the profiler saw it in a few steps.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ComparedOp {
    /// Its name.
    pub name: String,
    /// Its self time on the host plus its time on the device, divided by the duration of a profiled step, before. It
    /// may exceed 1, because host and device work at the same time.
    pub before_share: f64,
    /// The same after.
    pub after_share: f64,
    /// Mean calls per step before.
    pub before_calls: f64,
    /// The same after.
    pub after_calls: f64,
}

/// Memory in both runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ComparedBytes {
    /// What it is.
    pub name: String,
    /// Bytes before.
    pub before_bytes: f64,
    /// Bytes after.
    pub after_bytes: f64,
}

impl Comparison {
    /// Compares two runs.
    pub fn of(before: &RunProfile, after: &RunProfile) -> Self {
        let runs = [before, after].map(timed);
        let mut notes = Vec::new();
        let step = compare("step", false, &runs, median(|step| Some(step.total_seconds())), &mut notes);
        let mut times = vec![step];
        let mark_differently = marks_steps(before) != marks_steps(after);
        for (is_on_device, seconds) in [(false, host as fn(&StepTimes, Phase) -> _), (true, device)] {
            for phase in Phase::ALL {
                let of_phase = median(move |step: &StepTimes| seconds(step, phase));
                let mut time = compare(phase.name(), is_on_device, &runs, of_phase, &mut notes);
                if mark_differently {
                    (time.ratio, time.ratio_interval, time.verdict) = (None, None, Verdict::NotComparable);
                }
                times.extend((time.before_seconds > 0.0 || time.after_seconds > 0.0).then_some(time));
            }
        }
        let have_samples = runs.iter().all(|steps| steps.iter().any(|step| step.samples > 0));
        let sample_time = have_samples.then(|| compare("sample", false, &runs, Series::seconds_a_sample, &mut notes));
        notes.extend(differences(before, after, &runs));
        Self {
            schema: 1,
            confidence: interval::CONFIDENCE,
            steps: [runs[0].len() as u64, runs[1].len() as u64],
            samples_per_second: sample_time.as_ref().filter(|it| it.ratio.is_some()).map(samples_per_second),
            sample_time,
            times,
            ops: ops(before.profiled.as_ref(), after.profiled.as_ref()),
            profiled_steps: [before, after].map(|run| run.profiled.as_ref().map_or(0, |it| it.steps)),
            memory: memory(before, after),
            notes,
        }
    }
}

/// Whether the program has a StepTimer. Without one, `other` is most of a step and includes the forward pass.
fn marks_steps(run: &RunProfile) -> bool {
    !run.notes.iter().any(|note| note == NO_STEP_TIMER)
}

/// The steps to compare: those that no profiler slowed down.
fn timed(run: &RunProfile) -> Vec<&StepTimes> {
    run.step_times.iter().filter(|step| !step.is_profiled && step.total_seconds().is_finite()).collect()
}

fn host(step: &StepTimes, phase: Phase) -> Option<f64> {
    step.host_seconds.get(phase as usize).copied()
}

fn device(step: &StepTimes, phase: Phase) -> Option<f64> {
    step.device_seconds.as_ref()?.get(phase as usize).copied()
}

fn median(seconds: impl Fn(&StepTimes) -> Option<f64>) -> impl Fn(&[&StepTimes]) -> Series {
    move |steps| Series::median(steps.iter().filter_map(|step| seconds(step)).collect())
}

fn compare(
    name: &str,
    is_on_device: bool,
    runs: &[Vec<&StepTimes>; 2],
    series: impl Fn(&[&StepTimes]) -> Series,
    notes: &mut Vec<String>,
) -> ComparedTime {
    let series = [series(&runs[0]), series(&runs[1])];
    let [before_seconds, after_seconds] = [series[0].value(), series[1].value()];
    let has_both = before_seconds > 0.0 && after_seconds > 0.0;
    let mut compared = ComparedTime {
        name: name.to_owned(),
        is_on_device,
        before_seconds,
        after_seconds,
        ratio: has_both.then(|| after_seconds / before_seconds),
        ratio_interval: None,
        verdict: Verdict::TooFewSteps,
    };
    if series.iter().any(|series| series.len() < LEAST_STEPS) {
        return compared;
    }
    let [before, after] = series.each_ref().map(Series::estimate);
    if name == "step" && (before.is_doubtful || after.is_doubtful) {
        notes.push(
            "steps are correlated over so long a time that the intervals may be too narrow: compare longer runs"
                .to_owned(),
        );
    }
    compared.ratio_interval = (before.is_steady() && after.is_steady()).then(|| interval::of_ratio(&before, &after, Z));
    compared.verdict = match compared.ratio_interval {
        Some([low, high]) => verdict([low - 1.0, high - 1.0]),
        None => verdict_by_differences([&before, &after], &series),
    };
    compared
}

/// From the times per sample, which are above 0.
fn samples_per_second(time: &ComparedTime) -> [f64; 2] {
    [1.0 / time.before_seconds, 1.0 / time.after_seconds]
}

/// The verdict for the interval of a change.
fn verdict([low, high]: [f64; 2]) -> Verdict {
    match (low, high) {
        (_, high) if high < 0.0 => Verdict::Faster,
        (low, _) if low > 0.0 => Verdict::Slower,
        _ => Verdict::WithinNoise,
    }
}

/// The verdict for times without an interval of the ratio, such as those of a phase that only some steps have. The
/// median may then jump between 0 and the phase's usual time although the mean is known well; and the mean may depend
/// on a few long steps, which the median ignores. So both are tested, each at half the risk, and either may decide,
/// unless they contradict each other.
fn verdict_by_differences([before, after]: [&Estimate; 2], series: &[Series; 2]) -> Verdict {
    let means = series.each_ref().map(|series| series.mean().estimate());
    let medians = interval::of_difference(before, after, Z_OF_TWO);
    let verdicts = [medians, interval::of_difference(&means[0], &means[1], Z_OF_TWO)].map(verdict);
    match (verdicts.contains(&Verdict::Faster), verdicts.contains(&Verdict::Slower)) {
        (true, false) => Verdict::Faster,
        (false, true) => Verdict::Slower,
        _ => Verdict::WithinNoise,
    }
}

/// The operators whose share of a profiled step changed most.
fn ops(before: Option<&ProfiledSteps>, after: Option<&ProfiledSteps>) -> Vec<ComparedOp> {
    let (Some(before), Some(after)) = (before, after) else { return Vec::new() };
    let mut rows: BTreeMap<&str, ComparedOp> = BTreeMap::new();
    for (is_after, profiled) in [(false, before), (true, after)] {
        for op in profiled.ops.iter().filter(|_| profiled.step_seconds > 0.0) {
            let row = rows.entry(&op.name).or_insert_with(|| ComparedOp {
                name: op.name.clone(),
                before_share: 0.0,
                after_share: 0.0,
                before_calls: 0.0,
                after_calls: 0.0,
            });
            let share = (op.self_cpu_seconds + op.device_seconds) / profiled.step_seconds;
            let (shares, calls) = match is_after {
                false => (&mut row.before_share, &mut row.before_calls),
                true => (&mut row.after_share, &mut row.after_calls),
            };
            *shares += share;
            *calls += op.calls;
        }
    }
    let mut rows: Vec<ComparedOp> = rows.into_values().collect();
    let change = |op: &ComparedOp| (op.after_share - op.before_share).abs();
    rows.retain(|op| change(op) > LEAST_CHANGE);
    rows.sort_by(|one, other| change(other).total_cmp(&change(one)));
    rows.truncate(MOST_OPS);
    rows
}

fn memory(before: &RunProfile, after: &RunProfile) -> Vec<ComparedBytes> {
    let row = |name: &str, figure: fn(&RunProfile) -> Option<f64>| {
        let (before_bytes, after_bytes) = figure(before).zip(figure(after))?;
        Some(ComparedBytes { name: name.to_owned(), before_bytes, after_bytes })
    };
    let rows = [row("peak resident memory", peak_resident_bytes), row("peak GPU memory", peak_gpu_bytes)];
    rows.into_iter().flatten().collect()
}

/// Reasons other than the program why times may differ.
fn differences(before: &RunProfile, after: &RunProfile, runs: &[Vec<&StepTimes>; 2]) -> Vec<String> {
    let mut notes = Vec::new();
    for (steps, name) in runs.iter().zip(["before", "after"]) {
        if steps.len() < LEAST_STEPS {
            let count = steps.len();
            notes.push(format!("only {count} steps were timed {name}: estimating noise needs at least {LEAST_STEPS}"));
        }
    }
    if marks_steps(before) != marks_steps(after) {
        let (with, without) = if marks_steps(before) { ("before", "after") } else { ("after", "before") };
        notes.push(format!(
            "the program has a StepTimer {with}, but not {without}: phases mean different things and are not compared"
        ));
    }
    let (one, other) = (&before.machine, &after.machine);
    let gpu = |run: &RunProfile| run.machine.gpu.clone().unwrap_or_else(|| "none".to_owned());
    let samples = |steps: &[&StepTimes]| steps.iter().map(|step| step.samples).max().unwrap_or(0);
    let facts = [
        ("the program", program(before), program(after)),
        ("the machine", one.host.clone(), other.host.clone()),
        ("the system", one.system.clone(), other.system.clone()),
        ("CPUs", one.cpus.to_string(), other.cpus.to_string()),
        ("threads per operator", one.torch_threads.to_string(), other.torch_threads.to_string()),
        ("the device", one.device.clone(), other.device.clone()),
        ("the GPU", gpu(before), gpu(after)),
        ("ranks", before.world_size.to_string(), after.world_size.to_string()),
        ("samples per step", samples(&runs[0]).to_string(), samples(&runs[1]).to_string()),
    ];
    // A record may not know its program.
    let differing = facts.into_iter().filter(|(_, one, other)| one != other && !one.is_empty() && !other.is_empty());
    notes.extend(differing.map(|(what, one, other)| format!("the runs differ in {what}: {one} before, {other} after")));
    notes
}

/// The program's file name; its folder does not matter.
fn program(run: &RunProfile) -> String {
    let file = run.command.first().and_then(|path| Path::new(path).file_name());
    file.unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
