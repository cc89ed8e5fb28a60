//! Findings about memory that grows, or is too small.

use std::collections::BTreeSet;

use overdrive_core::MemoryTechnique;

use super::caches::Filling;
use super::facts::{Facts, mean};
use super::finding::{Bottleneck, Finding};
use super::host::most_called;
use crate::page::text::bytes;
use crate::{GpuSample, OpTimes, RunProfile, Sample};

/// Smaller growth may only be a heap that has not settled yet.
const LEAST_GROWTH_BYTES: f64 = 16.0 * 1024.0 * 1024.0;
/// Growth is not reported if the free memory lasts longer than a day.
const NO_MATTER_SECONDS: f64 = 24.0 * 3600.0;
/// The minimum number of samples for a linear fit.
const LEAST_SAMPLES: usize = 8;
/// The minimum time, in which a program should have done all of its kinds of work once.
const LEAST_SECONDS: f64 = 0.5;
/// The minimum r² of the fit.
const LEAST_FIT: f64 = 0.9;
/// Major page faults per second: above this the process is swapped, or its files do not fit into memory.
const SWAPPING_FAULTS: f64 = 100.0;

pub(super) fn findings(facts: &Facts<'_>) -> Vec<Finding> {
    let full = swapping(facts).into_iter().chain(short_of_gpu_memory(facts)).chain(does_not_fit(facts));
    growth(facts).into_iter().chain(full).collect()
}

/// A straight line through points.
struct Line {
    slope: f64,
    /// r²: the share of the variance that it explains, from 0 to 1.
    fit: f64,
}

impl Line {
    fn through(points: &[(f64, f64)]) -> Option<Self> {
        let count = points.len() as f64;
        let (mx, my) = (mean(points.iter().map(|it| it.0))?, mean(points.iter().map(|it| it.1))?);
        let products =
            |f: fn((f64, f64)) -> f64| points.iter().map(|it| f((it.0 - mx, it.1 - my))).sum::<f64>() / count;
        let (xx, xy, yy) = (products(|d| d.0 * d.0), products(|d| d.0 * d.1), products(|d| d.1 * d.1));
        (xx > 0.0 && yy > 0.0).then(|| Self { slope: xy / xx, fit: xy * xy / (xx * yy) })
    }
}

fn growth(facts: &Facts<'_>) -> Option<Finding> {
    match (gpu_growth(facts), Filling::of(facts)) {
        (None, Some(caches)) => process_growth(facts).and_then(|growth| growth_of_caches(facts, &growth, &caches)),
        (of_gpu, _) => of_gpu.or_else(|| process_growth(facts)).map(|growth| leak(facts, &growth)),
    }
}

/// Each GPU is judged separately; the one that will be full first is reported.
fn gpu_growth(facts: &Facts<'_>) -> Option<Growth> {
    let gpus = gpu_indices(facts);
    let growing = gpus.iter().filter_map(|&gpu| {
        let used = series(facts, |sample| Some(of_gpu(sample, gpu)?.memory_used_bytes? as f64));
        grows(format!("the memory of GPU {gpu}"), used, free_gpu_memory(facts, gpu))
    });
    growing.min_by(|one, other| one.seconds_left().total_cmp(&other.seconds_left()))
}

fn process_growth(facts: &Facts<'_>) -> Option<Growth> {
    let own = series(facts, |sample| Some(sample.process?.own_memory_bytes() as f64));
    grows("the process".to_owned(), own, free_memory(facts))
}

fn leak(facts: &Facts<'_>, growth: &Growth) -> Finding {
    let mut finding = growth.finding(facts).remedy(
        "find what is kept from step to step: a loss with its graph (use `total += loss.double_value(&[])` or \
         `loss.detach()`), outputs in a `Vec`, a cache without a limit; `leak_check` of overdrive-memory names the \
         lines that leave tensors behind",
    );
    finding.evidence.extend(tensors(facts));
    finding
}

/// None if there is enough memory for the full caches.
fn growth_of_caches(facts: &Facts<'_>, growth: &Growth, caches: &Filling) -> Option<Finding> {
    let remedy = "keep less of the dataset in memory: `Cached::with_budget`, cache samples before they are decoded, \
                  `DiskCached`";
    (!caches.fits()).then(|| growth.finding(facts).evidence(caches.text()).remedy(remedy))
}

/// A note if memory grows only because caches fill, which is not a finding.
pub(super) fn note(facts: &Facts<'_>) -> Option<String> {
    let caches = Filling::of(facts).filter(Filling::fits)?;
    process_growth(facts)?;
    Some(format!("{}; only later steps will show whether memory also grows for another reason", caches.text()))
}

/// Evidence that tensors leak: what the profiled steps did not free.
fn tensors(facts: &Facts<'_>) -> Option<String> {
    let profiled = facts.profiled()?;
    let kept = profiled.kept_bytes.iter().filter(|(_, bytes)| **bytes > 0.0);
    let kept: Vec<_> = kept.map(|(device, bytes)| format!("{:.3} MB on {device}", bytes / 1e6)).collect();
    (!kept.is_empty()).then(|| format!("tensors that each profiled step did not free: {}", kept.join(", ")))
}

struct Growth {
    what: String,
    bytes_per_second: f64,
    free: Option<f64>,
}

impl Growth {
    /// Infinite if the free memory is not known.
    fn seconds_left(&self) -> f64 {
        self.free.map_or(f64::INFINITY, |free| free / self.bytes_per_second)
    }

    fn matters(&self) -> bool {
        self.free.is_none() || self.seconds_left() <= NO_MATTER_SECONDS
    }

    fn finding(&self, facts: &Facts<'_>) -> Finding {
        let per_step = self.bytes_per_second * facts.step_seconds_with_skipped();
        let left = self.free.map(|bytes| {
            format!("{:.1} GB are free: enough for {:.0} more steps", bytes / 1e9, (bytes / per_step).floor())
        });
        let mut finding = Finding::without_bound(Bottleneck::MemoryGrowth).evidence(format!(
            "{} grows steadily by {:.3} MB per step",
            self.what,
            per_step / 1e6
        ));
        finding.bytes_per_step = per_step;
        finding.evidence.extend(left);
        finding
    }
}

fn grows(what: String, points: Vec<(f64, f64)>, free: Option<f64>) -> Option<Growth> {
    let third = points.len() / 3;
    let (first, last) = (points.first()?, points.last()?);
    if points.len() < LEAST_SAMPLES || last.0 - first.0 < LEAST_SECONDS || last.1 - first.1 < LEAST_GROWTH_BYTES {
        return None;
    }
    let line = Line::through(&points)?;
    // The growth of a heap that settles slows down: its last third grows less than its first.
    let slope = |part: &[(f64, f64)]| Line::through(part).map_or(0.0, |line| line.slope);
    let parts = [&points[..third], &points[third..2 * third], &points[2 * third..]];
    let is_steady = line.fit >= LEAST_FIT && parts.iter().all(|part| slope(part) >= 0.4 * line.slope);
    Some(Growth { what, bytes_per_second: line.slope, free }).filter(|growth| is_steady && growth.matters())
}

fn swapping(facts: &Facts<'_>) -> Option<Finding> {
    let faults = facts.samples_of_steps().filter_map(|it| it.process?.rates?.major_page_faults_per_second);
    let faults = mean(faults).filter(|faults| *faults >= SWAPPING_FAULTS)?;
    let main = facts.main_thread()?;
    let blocked = (1.0 - main.busy - main.queued).clamp(0.0, 1.0);
    let finding = facts.finding(Bottleneck::MemoryCapacity, blocked * facts.step_seconds)?;
    Some(
        finding
            .evidence(format!("{faults:.0} pages per second are read back from disks"))
            .evidence(format!("the training thread is blocked for {:.0}% of the time", 100.0 * blocked))
            .remedy(
                "use less memory: smaller batches with `Accumulator`, smaller caches (`memory_budget`), fewer workers",
            ),
    )
}

/// By the program's own forecast, a step needs more than it may have.
fn does_not_fit(facts: &Facts<'_>) -> Option<Finding> {
    let forecast = facts.run.memory_forecast.as_ref()?;
    let limit = forecast.limit_bytes.filter(|&limit| forecast.peak_bytes > limit)?;
    let size = |of: u64| bytes(of as f64);
    let largest = forecast.uses.iter().max_by_key(|it| it.at_peak)?;
    let mut finding = Finding::without_bound(Bottleneck::MemoryCapacity)
        .evidence(format!(
            "a step with {} samples needs {} on {}, which may have {}",
            forecast.batch_size,
            size(forecast.peak_bytes),
            forecast.device,
            size(limit)
        ))
        .evidence(format!("{} of it are {}", size(largest.at_peak), largest.name));
    finding.evidence.extend(forecast.largest_batch.map(|batch| format!("batches of up to {batch} fit")));
    let fitting = forecast.techniques.iter().filter(|technique| technique.peak_bytes <= limit);
    let told = |technique: &MemoryTechnique| {
        let about = if technique.is_rough { "about " } else { "" };
        format!("{} ({about}{})", technique.name, size(technique.peak_bytes))
    };
    let fitting: Vec<_> = fitting.map(told).collect();
    Some(finding.remedy(match fitting.is_empty() {
        true => "no single technique fits: use several together, or a smaller model".to_owned(),
        false => format!("one of these: {}", fitting.join("; ")),
    }))
}

/// libtorch's allocator had to free its cache to get memory, which waits for the GPU. The time that this takes is not
/// known.
fn short_of_gpu_memory(facts: &Facts<'_>) -> Option<Finding> {
    let retries = facts.run.alloc_retries.filter(|retries| *retries > 0)?;
    let takes_memory = |op: &OpTimes| op.name.starts_with("cudaMalloc") || op.name.starts_with("cuMemCreate");
    let call = facts.profiled().and_then(|profiled| most_called(profiled, takes_memory));
    let mut finding = Finding::without_bound(Bottleneck::MemoryCapacity)
        .op(call.map(|(name, _)| name))
        .scope(facts.scope_of_ops(|op| if takes_memory(op) { op.calls } else { 0.0 }))
        .evidence(format!("`cudaMalloc` failed {retries} times, and the allocator freed its cache to try again"))
        .remedy(
            "use less memory: smaller batches with `Accumulator` or `AutoMicroBatch`, `checkpoint` around layers, autocast, \
             8-bit optimizer state, `CpuOffloadOptimizer`; batches of similar length fragment the cache less",
        );
    for gpu in gpu_indices(facts) {
        let samples = facts.samples.iter().filter_map(|sample| of_gpu(sample, gpu));
        let full = samples.filter_map(|it| Some(it.memory_used_bytes? as f64 / it.memory_total_bytes? as f64));
        if let Some(share) = full.max_by(f64::total_cmp) {
            finding = finding.evidence(format!("the memory of GPU {gpu} was {:.0}% full", 100.0 * share));
        }
    }
    Some(finding)
}

/// A figure over the time of the steps. The profiled steps are cut out, because the profiler's own memory is not
/// growth.
fn series(facts: &Facts<'_>, figure: impl Fn(&Sample) -> Option<f64>) -> Vec<(f64, f64)> {
    let profiled = profiled_spans(facts.run);
    let mut points: Vec<(f64, f64)> = Vec::new();
    // The time and the growth that have been cut out so far.
    let (mut left_out, mut last) = ((0.0, 0.0), None);
    for point in facts.samples_of_steps().filter_map(|it| Some((it.elapsed_seconds, figure(it)?))) {
        let before: (f64, f64) = last.replace(point).unwrap_or(point);
        if profiled.iter().any(|(from, to)| before.0 <= *to && *from <= point.0) {
            left_out = (left_out.0 + point.0 - before.0, left_out.1 + point.1 - before.1);
        } else {
            points.push((point.0 - left_out.0, point.1 - left_out.1));
        }
    }
    points
}

/// From the first profiled step to the first one after the profiler, which has handed over its record by then.
fn profiled_spans(run: &RunProfile) -> Vec<(f64, f64)> {
    let mut spans: Vec<(f64, f64)> = Vec::new();
    let mut was_profiled = false;
    for step in &run.step_times {
        if step.is_profiled && !was_profiled {
            spans.push((step.start_seconds, f64::INFINITY));
        } else if let Some(span) = spans.last_mut().filter(|_| was_profiled && !step.is_profiled) {
            span.1 = step.start_seconds;
        }
        was_profiled = step.is_profiled;
    }
    spans
}

fn free_memory(facts: &Facts<'_>) -> Option<f64> {
    Some(facts.samples.last()?.system?.memory_available_bytes? as f64)
}

fn free_gpu_memory(facts: &Facts<'_>, gpu: u32) -> Option<f64> {
    let last = facts.samples.iter().rev().find_map(|sample| of_gpu(sample, gpu))?;
    Some(last.memory_total_bytes?.saturating_sub(last.memory_used_bytes?) as f64)
}

/// The GPUs in the samples.
pub(super) fn gpu_indices(facts: &Facts<'_>) -> BTreeSet<u32> {
    facts.samples.iter().flat_map(|sample| &sample.gpus).map(|gpu| gpu.index).collect()
}

pub(super) fn of_gpu(sample: &Sample, index: u32) -> Option<&GpuSample> {
    sample.gpus.iter().find(|gpu| gpu.index == index)
}
