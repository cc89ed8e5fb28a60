//! The machine over time.

use std::collections::BTreeMap;

use super::chart::{Lines, Series};
use super::section;
use super::table::{Cell, numbers, table, words};
use super::text::{bytes, percent, time};
use crate::{GpuSample, MemoryTimeline, RunProfile, Sample, ThreadSample};

/// The maximum number of rows in the table of threads.
const MOST_THREADS: usize = 40;
/// The maximum number of lines in a chart.
const MOST_GPUS: usize = 8;

/// Memory of the process, of GPUs, and of tensors in the profiled steps.
pub(super) fn memory(run: &RunProfile) -> String {
    let resident = series("resident", run, |sample| Some(sample.process?.resident_memory_bytes as f64));
    let charts = [
        Lines { title: "Memory of the process", series: vec![resident], reach: 0.0, unit: bytes }.draw(),
        Lines {
            title: "Memory of GPUs",
            series: of_gpus(run, |gpu| gpu.memory_used_bytes.map(|bytes| bytes as f64)),
            reach: 0.0,
            unit: bytes,
        }
        .draw(),
        run.profiled.as_ref().and_then(|profiled| tensors(&profiled.memory)),
    ];
    let explanation = "The last chart shows memory of tensors relative to when the profiler began.";
    let has_tensors = charts[2].is_some();
    put("Memory over time", if has_tensors { explanation } else { "" }, charts.into_iter().flatten().collect())
}

/// Allocations in the profiled steps.
fn tensors(lines: &[MemoryTimeline]) -> Option<String> {
    let line = |line: &MemoryTimeline| {
        let least = line.in_use.iter().copied().min().unwrap_or(0).min(0);
        let points = line.times_ns.iter().zip(&line.in_use);
        let points = points.map(|(at, bytes)| (*at as f64 / 1e9, Some((bytes - least) as f64)));
        Series { name: line.device.clone(), points: points.collect() }
    };
    let series = lines.iter().take(MOST_GPUS).map(line).collect();
    Lines { title: "Memory of tensors in the profiled steps", series, reach: 0.0, unit: bytes }.draw()
}

/// How busy CPUs, GPUs and disks are.
pub(super) fn use_over_time(run: &RunProfile) -> String {
    let cpus = run.samples.iter().filter_map(|sample| sample.system).map(|system| system.cpus).max().unwrap_or(0);
    let busy = vec![
        series("this process", run, |sample| sample.process?.rates?.cpus_busy),
        series("the machine", run, |sample| sample.system?.rates?.cpus_busy),
    ];
    let disk = vec![
        series("read", run, |sample| sample.process?.rates?.disk_read_bytes_per_second),
        series("written", run, |sample| sample.process?.rates?.disk_written_bytes_per_second),
    ];
    let has_disk = disk.iter().flat_map(|line| &line.points).any(|point| point.1 > Some(0.0));
    let charts = [
        Lines { title: "Busy CPUs", series: busy, reach: f64::from(cpus), unit: tenths }.draw(),
        Lines { title: "GPU utilisation", series: of_gpus(run, |gpu| gpu.utilization), reach: 1.0, unit: percent }
            .draw(),
        Lines { title: "Tensor cores", series: of_gpus(run, |gpu| gpu.tensor_utilization), reach: 1.0, unit: percent }
            .draw(),
        Lines { title: "GPU power", series: of_gpus(run, |gpu| gpu.power_watts), reach: 0.0, unit: watts }.draw(),
        has_disk
            .then(|| Lines { title: "Disks, by this process", series: disk, reach: 0.0, unit: rate }.draw())
            .flatten(),
    ];
    let (charts, gpus) = (charts.into_iter().flatten().collect::<Vec<_>>(), gpus(run));
    put("CPUs and GPUs over time", "", charts) + &gpus
}

fn tenths(value: f64) -> String {
    format!("{value:.1}")
}

fn watts(watts: f64) -> String {
    format!("{watts:.0} W")
}

fn rate(rate: f64) -> String {
    format!("{}/s", bytes(rate))
}

fn put(title: &str, explanation: &str, charts: Vec<String>) -> String {
    if charts.is_empty() {
        return section(title, "No data: the run was too short for two samples of the machine.", "");
    }
    section(title, explanation, &format!("<div class=\"charts\">{}</div>", charts.concat()))
}

fn series(name: &str, run: &RunProfile, value: impl Fn(&Sample) -> Option<f64>) -> Series {
    let points = run.samples.iter().map(|sample| (sample.elapsed_seconds, value(sample))).collect();
    Series { name: name.to_owned(), points }
}

/// A line for each GPU.
fn of_gpus(run: &RunProfile, value: impl Fn(&GpuSample) -> Option<f64>) -> Vec<Series> {
    let line = |index: u32| {
        series(&format!("GPU {index}"), run, |sample| value(sample.gpus.iter().find(|gpu| gpu.index == index)?))
    };
    indices(run).into_iter().take(MOST_GPUS).map(line).collect()
}

fn indices(run: &RunProfile) -> Vec<u32> {
    let mut indices: Vec<u32> = run.samples.iter().flat_map(|sample| &sample.gpus).map(|gpu| gpu.index).collect();
    indices.sort_unstable();
    indices.dedup();
    indices
}

/// Figures of each GPU.
fn gpus(run: &RunProfile) -> String {
    let indices = indices(run);
    if indices.is_empty() {
        return String::new();
    }
    let columns = [
        words("GPU"),
        words("Name"),
        numbers("Utilisation, mean"),
        numbers("Memory, peak"),
        numbers("Memory, total"),
        numbers("Temperature, max °C"),
        numbers("Clock, mean MHz"),
        numbers("Throttled"),
    ];
    let rows = indices.into_iter().map(|index| {
        let all: Vec<_> = run.samples.iter().flat_map(|sample| &sample.gpus).filter(|gpu| gpu.index == index).collect();
        let values = |value: fn(&GpuSample) -> Option<f64>| {
            all.iter().filter_map(|gpu| value(gpu)).filter(|value| value.is_finite()).collect::<Vec<f64>>()
        };
        let mean = |value| {
            let values = values(value);
            (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
        };
        let most = |value| values(value).into_iter().reduce(f64::max);
        let throttled = all.iter().filter(|gpu| gpu.is_throttled()).count() as f64 / all.len() as f64;
        vec![
            Cell::number(index.to_string(), f64::from(index)),
            Cell::text(all.first().map_or("", |gpu| &gpu.name)),
            Cell::maybe(mean(|gpu| gpu.utilization), percent),
            Cell::maybe(most(|gpu| gpu.memory_used_bytes.map(|it| it as f64)), bytes),
            Cell::maybe(most(|gpu| gpu.memory_total_bytes.map(|it| it as f64)), bytes),
            Cell::maybe(most(|gpu| gpu.temperature_celsius), |it| format!("{it:.0}")),
            Cell::maybe(mean(|gpu| gpu.sm_clock_hertz), |it| format!("{:.0}", it / 1e6)),
            Cell::number(percent(throttled), throttled).marked(throttled > 0.05),
        ]
    });
    section("GPUs", "", &table("GPUs", &columns, rows.collect()))
}

/// How long each thread ran, and how long it waited for a CPU.
pub(super) fn threads(run: &RunProfile) -> String {
    let mut seen: BTreeMap<i32, Vec<(f64, &ThreadSample)>> = BTreeMap::new();
    for sample in &run.samples {
        for thread in &sample.threads {
            seen.entry(thread.id).or_default().push((sample.elapsed_seconds, thread));
        }
    }
    let mut rows: Vec<(i32, &str, f64, f64, f64)> = Vec::new();
    for (id, samples) in seen {
        let (Some((from, first)), Some((to, last))) = (samples.first(), samples.last()) else { continue };
        let (cpu, queued) = (last.cpu_seconds - first.cpu_seconds, last.queued_seconds - first.queued_seconds);
        if to > from {
            rows.push((id, &last.name, to - from, cpu.max(0.0), queued.max(0.0)));
        }
    }
    if rows.is_empty() {
        return section("Threads", "No thread was sampled twice.", "");
    }
    rows.sort_by(|one, other| (other.3 + other.4).total_cmp(&(one.3 + one.4)));
    let more = rows.len().saturating_sub(MOST_THREADS);
    rows.truncate(MOST_THREADS);
    let columns = [
        words("Thread"),
        words("Name"),
        numbers("Sampled for"),
        numbers("On a CPU"),
        numbers("Share"),
        numbers("Waiting for a CPU"),
        numbers("Share"),
    ];
    let cells = rows.into_iter().map(|(id, name, seconds, cpu, queued)| {
        let name = if id == run.timer_thread { format!("{name} (training)") } else { name.to_owned() };
        vec![
            Cell::number(id.to_string(), f64::from(id)),
            Cell::text(&name),
            Cell::number(time(seconds), seconds),
            Cell::number(time(cpu), cpu),
            Cell::number(percent(cpu / seconds), cpu / seconds),
            Cell::number(time(queued), queued),
            Cell::number(percent(queued / seconds), queued / seconds),
        ]
    });
    let explanation = match more {
        0 => String::new(),
        more => format!("The {MOST_THREADS} busiest threads; {more} more are left out."),
    };
    section("Threads", &explanation, &table("Threads", &columns, cells.collect()))
}
