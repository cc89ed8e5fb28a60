//! Made-up runs, for diagnoses that need a GPU, several ranks or a bad machine.

use overdrive_profile::{Bottleneck, Diagnosis, Phase, RunProfile};
use serde_json::{Value, json};

/// A report of steps whose phases take these milliseconds.
pub fn report(phases: &[(Phase, f64)]) -> Value {
    let of = |phase: Phase| phases.iter().find(|(it, _)| *it == phase).map_or(0.0, |(_, ms)| ms / 1e3);
    let whole: f64 = Phase::ALL.into_iter().map(of).sum();
    let phases = Phase::ALL.map(|phase| {
        json!({ "phase": phase, "total_seconds": 100.0 * of(phase), "median_seconds": of(phase),
                "p95_seconds": of(phase), "share": of(phase) / whole })
    });
    json!({ "steps": 100, "steps_seen": 110, "total_seconds": 100.0 * whole, "median_seconds": whole,
            "p95_seconds": whole, "phases": phases.to_vec(), "device": null, "samples_per_second": 1.0,
            "tokens_per_second": null, "mfu": null, "clock_jumps": 0, "device_fault": null })
}

/// A run with these phases, with the same times under the profiler, on a machine with 4 CPUs.
pub fn run(phases: &[(Phase, f64)]) -> RunProfile {
    let mut run = RunProfile::default();
    (run.schema, run.world_size, run.timer_thread) = (1, 1, 7);
    run.machine.cpus = 4;
    run.machine.device = "cpu".to_owned();
    run.steps = serde_json::from_value(report(phases)).unwrap();
    let seconds = |phase: Phase| phases.iter().find(|(it, _)| *it == phase).map_or(0.0, |(_, ms)| ms / 1e3);
    let whole: f64 = phases.iter().map(|(_, ms)| ms / 1e3).sum();
    let times = Phase::ALL.map(|phase| {
        json!({ "phase": phase, "seconds": seconds(phase), "operator_seconds": seconds(phase), "operators": 10.0,
                "small_calls": 0.0, "small_call_seconds": 0.0, "short_pause_seconds": 0.0,
                "calls": 10.0, "communication_seconds": 0.0, "exchange_operator_seconds": 0.0 })
    });
    let product = json!({ "name": "aten::mm", "phase": "forward", "scope": null, "calls": 1.0,
                          "self_cpu_seconds": whole, "device_seconds": whole, "flops": 1.0 });
    run.profiled = serde_json::from_value(json!({
        "steps": 5, "step_seconds": whole, "phases": times.to_vec(), "ops": [product], "scopes": [], "gaps": [],
        "read_backs": [], "device_work": [], "device_busy_seconds": null, "memory": [],
    }))
    .unwrap();
    run
}

pub fn on_gpu(phases: &[(Phase, f64)], busy_seconds: f64, work: &[(&str, f64)]) -> RunProfile {
    let mut run = run(phases);
    run.machine.device = "cuda:0".to_owned();
    let profiled = run.profiled.as_mut().unwrap();
    profiled.device_busy_seconds = Some(busy_seconds);
    let work = work
        .iter()
        .map(|(name, ms)| json!({ "name": name, "calls": 2.0, "seconds": ms / 1e3, "is_main_thread": false }));
    profiled.device_work = serde_json::from_value(work.collect()).unwrap();
    run
}

/// Adds ten samples of the machine, 0.1 s apart; `sample` gets each one's number.
pub fn with_samples(mut run: RunProfile, sample: impl Fn(f64) -> Value) -> RunProfile {
    run.samples = (0..10)
        .map(|number| {
            let mut empty = json!({ "unix_seconds": 0.0, "elapsed_seconds": 0.1 * f64::from(number), "system": null,
                                    "process": null, "gpus": [] });
            empty.as_object_mut().unwrap().append(sample(f64::from(number)).as_object_mut().unwrap());
            serde_json::from_value(empty).unwrap()
        })
        .collect();
    run
}

pub fn threads(number: f64, main: f64, workers: &[f64]) -> Vec<Value> {
    let thread = |id: i32, name: String, busy: f64| json!({ "id": id, "name": name, "cpu_seconds": 0.1 * number * busy, "queued_seconds": 0.0 });
    let workers = workers.iter().enumerate().map(|(at, busy)| thread(10 + at as i32, format!("dataload-{at}"), *busy));
    std::iter::once(thread(7, "train".to_owned(), main)).chain(workers).collect()
}

pub fn system(busy: f64) -> Value {
    let counters = json!({ "cpu_seconds": 0.0, "disk_read_bytes": 0, "disk_written_bytes": 0, "context_switches": 0,
                           "page_faults": 0, "major_page_faults": 0 });
    json!({ "cpus": 4, "load1": 0.0, "load5": 0.0, "load15": 0.0, "memory_total_bytes": 8_000_000_000_u64,
            "memory_available_bytes": 4_000_000_000_u64, "counters": counters, "rates": { "cpus_busy": busy } })
}

pub fn process(resident: f64, faults: f64) -> Value {
    let counters = json!({ "cpu_seconds": 0.0, "disk_read_bytes": 0, "disk_written_bytes": 0, "context_switches": 0,
                           "page_faults": 0, "major_page_faults": 0 });
    json!({ "resident_memory_bytes": resident as u64, "threads": 1, "counters": counters,
            "rates": { "major_page_faults_per_second": faults } })
}

pub fn first(run: &RunProfile) -> (Bottleneck, f64) {
    let diagnosis = Diagnosis::of(run);
    println!("{diagnosis}");
    let first = diagnosis.findings.first().expect("a finding");
    assert!(!first.evidence.is_empty() && !first.remedy.is_empty());
    assert_eq!(diagnosis.bound_by, Some(first.bottleneck));
    (first.bottleneck, (100.0 * first.speedup_bound()).round() / 100.0)
}

pub const ALL_FORWARD: [(Phase, f64); 1] = [(Phase::Forward, 10.0)];

/// Calls of an operator in a step, in a phase and a scope, and their milliseconds on the host and on a device.
pub fn op(name: &str, phase: Phase, scope: Option<&str>, calls: f64, (host, device): (f64, f64)) -> Value {
    json!({ "name": name, "phase": phase, "scope": scope, "calls": calls, "self_cpu_seconds": host / 1e3,
            "device_seconds": device / 1e3, "flops": 0.0 })
}

/// Replaces all operators.
pub fn with_ops(mut run: RunProfile, ops: Vec<Value>) -> RunProfile {
    run.profiled.as_mut().unwrap().ops = serde_json::from_value(ops.into()).unwrap();
    run
}

/// The first finding.
pub fn finding(run: &RunProfile) -> overdrive_profile::Finding {
    first(run);
    Diagnosis::of(run).findings.swap_remove(0)
}
