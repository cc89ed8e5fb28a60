//! Diagnoses of runs that were made up: what needs a GPU, several ranks or a bad machine.

use overdrive_profile::{Bottleneck, Diagnosis, Phase, RunProfile};
use serde_json::{Value, json};

/// Steps of 10 ms, whose phases take so many milliseconds.
fn report(phases: &[(Phase, f64)]) -> Value {
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

/// A run with these phases, profiled as it was timed, on a machine of 4 CPUs.
fn run(phases: &[(Phase, f64)]) -> RunProfile {
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

fn on_gpu(phases: &[(Phase, f64)], busy_seconds: f64, work: &[(&str, f64)]) -> RunProfile {
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

/// Looks at the machine, ten of them; each is told its number.
fn with_samples(mut run: RunProfile, sample: impl Fn(f64) -> Value) -> RunProfile {
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

fn threads(number: f64, main: f64, workers: &[f64]) -> Vec<Value> {
    let thread = |id: i32, name: String, busy: f64| json!({ "id": id, "name": name, "cpu_seconds": 0.1 * number * busy, "queued_seconds": 0.0 });
    let workers = workers.iter().enumerate().map(|(at, busy)| thread(10 + at as i32, format!("dataload-{at}"), *busy));
    std::iter::once(thread(7, "train".to_owned(), main)).chain(workers).collect()
}

fn system(busy: f64) -> Value {
    let counters = json!({ "cpu_seconds": 0.0, "disk_read_bytes": 0, "disk_written_bytes": 0, "context_switches": 0,
                           "page_faults": 0, "major_page_faults": 0 });
    json!({ "cpus": 4, "load1": 0.0, "load5": 0.0, "load15": 0.0, "memory_total_bytes": 8_000_000_000_u64,
            "memory_available_bytes": 4_000_000_000_u64, "counters": counters, "rates": { "cpus_busy": busy } })
}

fn process(resident: f64, faults: f64) -> Value {
    let counters = json!({ "cpu_seconds": 0.0, "disk_read_bytes": 0, "disk_written_bytes": 0, "context_switches": 0,
                           "page_faults": 0, "major_page_faults": 0 });
    json!({ "resident_memory_bytes": resident as u64, "threads": 1, "counters": counters,
            "rates": { "major_page_faults_per_second": faults } })
}

fn first(run: &RunProfile) -> (Bottleneck, f64) {
    let diagnosis = Diagnosis::of(run);
    println!("{diagnosis}");
    let first = diagnosis.findings.first().expect("a finding");
    assert!(!first.evidence.is_empty() && !first.remedy.is_empty());
    assert_eq!(diagnosis.bound_by, Some(first.bottleneck));
    (first.bottleneck, (100.0 * first.speedup_bound()).round() / 100.0)
}

const HALF_DATA: [(Phase, f64); 2] = [(Phase::DataWait, 5.0), (Phase::Forward, 5.0)];
const ALL_FORWARD: [(Phase, f64); 1] = [(Phase::Forward, 10.0)];

#[test]
fn workers_tell_why_data_is_late() {
    let with = |main: f64, workers: &'static [f64]| {
        let seen = move |number| json!({ "threads": threads(number, main, workers) });
        first(&with_samples(run(&HALF_DATA), seen))
    };
    assert_eq!(with(0.5, &[0.1, 0.1]), (Bottleneck::SlowRead, 2.0));
    assert_eq!(with(0.5, &[0.95, 0.95, 0.95, 0.95]), (Bottleneck::SlowDecode, 2.0));
    assert_eq!(with(0.5, &[0.95]), (Bottleneck::TooFewWorkers, 2.0));
    assert_eq!(with(1.0, &[]), (Bottleneck::TooFewWorkers, 2.0));
    assert_eq!(with(0.5, &[]), (Bottleneck::SlowRead, 2.0));
    // A twentieth of a CPU more would not help: the work has to become less.
    let mut large = with_samples(run(&HALF_DATA), |number| json!({ "threads": threads(number, 0.5, &[0.9; 14]) }));
    large.machine.cpus = 14;
    assert_eq!(first(&large), (Bottleneck::SlowDecode, 2.0));
    // libtorch's threads have the program's name, and say nothing of loading.
    let blocked = with_samples(run(&HALF_DATA), |number| {
        let mut threads = threads(number, 0.5, &[0.9]);
        threads[1]["name"] = json!("train");
        json!({ "threads": threads })
    });
    assert_eq!(first(&blocked), (Bottleneck::SlowRead, 2.0));
    // Three of four CPUs are at work: more workers could save a fourth of a step at best.
    assert_eq!(with(0.5, &[0.9, 0.9, 0.7]), (Bottleneck::TooFewWorkers, 1.33));
}

#[test]
fn a_gpu_tells_what_it_waits_for() {
    let phases = [(Phase::HostToDevice, 5.0), (Phase::Forward, 5.0)];
    let copies = on_gpu(&phases, 0.01, &[("Memcpy HtoD (Pageable -> Device)", 5.0)]);
    assert_eq!(first(&copies), (Bottleneck::HostToDevice, 2.0));
    let there_and_back = [("Memcpy DtoH (Device -> Pinned)", 2.5), ("Memcpy HtoD (Pinned -> Device)", 2.5)];
    assert_eq!(first(&on_gpu(&ALL_FORWARD, 0.01, &there_and_back)), (Bottleneck::Offload, 2.0));
    let single = [("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x64x8", 7.4)];
    assert_eq!(first(&on_gpu(&ALL_FORWARD, 0.01, &single)), (Bottleneck::Float32Matmul, 2.78));
    let launches = on_gpu(&ALL_FORWARD, 0.005, &[("vectorized_elementwise_kernel", 5.0)]);
    assert_eq!(first(&launches), (Bottleneck::KernelLaunches, 2.0));
    let mut waits = launches;
    let read = json!({ "name": "aten::_local_scalar_dense", "phase": "other", "scope": "metrics", "calls": 1.0,
                       "self_cpu_seconds": 0.004, "device_seconds": 0.0, "flops": 0.0 });
    waits.profiled.as_mut().unwrap().ops.push(serde_json::from_value(read).unwrap());
    assert_eq!(first(&waits), (Bottleneck::HostSync, 2.0));
    assert_eq!(Diagnosis::of(&waits).findings[0].scope.as_deref(), Some("metrics"));
    let mut short = on_gpu(&ALL_FORWARD, 0.01, &[]);
    short.alloc_retries = Some(3);
    assert_eq!(first(&short), (Bottleneck::MemoryCapacity, 1.0));
    // Tensor cores are used, and the device has no pause.
    let healthy = on_gpu(&ALL_FORWARD, 0.0098, &[("sm90_xmma_gemm_bf16bf16_bf16f32_f32", 9.0)]);
    assert_eq!(Diagnosis::of(&healthy).findings, []);
    assert_eq!(Diagnosis::of(&healthy).bound_by, Some(Bottleneck::Compute));
}

#[test]
fn clocks_that_are_held_down_are_named() {
    let gpu = |number: f64| {
        let hot = number >= 5.0;
        json!({ "gpus": [{
            "index": 0, "name": "H", "sm_clock_hertz": if hot { 1.0e9 } else { 2.0e9 }, "processes": [],
            "throttle_reasons": if hot { vec!["hardware_thermal"] } else { vec![] },
        }] })
    };
    let run = with_samples(on_gpu(&ALL_FORWARD, 0.01, &[]), gpu);
    assert_eq!(first(&run), (Bottleneck::Throttling, 1.33));
    assert!(Diagnosis::of(&run).findings[0].evidence[0].contains("hardware_thermal"));
}

#[test]
fn memory_that_grows_comes_first_and_a_heap_that_settles_does_not() {
    let with = |resident: fn(f64) -> f64| {
        with_samples(run(&HALF_DATA), move |number| {
            json!({ "process": process(resident(number), 0.0), "system": system(1.0),
                    "threads": threads(number, 1.0, &[]) })
        })
    };
    let leak = with(|number| 1e9 + 2e7 * number);
    assert_eq!(first(&leak), (Bottleneck::MemoryGrowth, 1.0));
    // 200 MB a second, in steps of 10 ms, into 4 GB.
    let evidence = &Diagnosis::of(&leak).findings[0].evidence;
    assert!(evidence[0].contains("2.000 MB a step") && evidence[1].contains("2000 more steps"), "{evidence:?}");
    let settles = with(|number| 1e9 + 2e8 * (1.0 - (-number).exp()));
    assert_eq!(first(&settles).0, Bottleneck::TooFewWorkers);
    let swapped = with_samples(
        run(&ALL_FORWARD),
        |number| json!({ "process": process(1e9, 500.0), "threads": threads(number, 0.4, &[]) }),
    );
    assert_eq!(first(&swapped), (Bottleneck::MemoryCapacity, 2.5));
}

#[test]
fn ranks_tell_who_is_slow_and_what_they_exchange() {
    let mut slow = run(&[(Phase::Forward, 4.0), (Phase::Communication, 6.0)]);
    (slow.world_size, slow.ranks) = (2, vec![slow.steps.clone().unwrap()]);
    let other = report(&[(Phase::Forward, 9.0), (Phase::Communication, 1.0)]);
    slow.ranks.push(serde_json::from_value(other).unwrap());
    assert_eq!(first(&slow), (Bottleneck::Straggler, 2.0));
    assert!(Diagnosis::of(&slow).findings[0].evidence[0].contains("rank 1"));
    // What is left when rank 1 is as fast as the other: 1 ms, a tenth of a step.
    assert_eq!(Diagnosis::of(&slow).findings.len(), 2);
    let mut exchange = run(&[(Phase::Forward, 4.0), (Phase::Communication, 6.0)]);
    (exchange.world_size, exchange.ranks) = (2, vec![exchange.steps.clone().unwrap(); 2]);
    assert_eq!(first(&exchange), (Bottleneck::Communication, 2.5));
    let mut alone = exchange;
    alone.world_size = 1;
    assert_eq!(Diagnosis::of(&alone).findings, []);
}

#[test]
fn whoever_waits_in_backward_is_not_the_slow_one() {
    let mut run = run(&[(Phase::Forward, 4.0), (Phase::Backward, 8.1)]);
    (run.world_size, run.ranks) = (2, vec![run.steps.clone().unwrap()]);
    let slow = report(&[(Phase::Forward, 10.0), (Phase::Backward, 2.0)]);
    run.ranks.push(serde_json::from_value(slow).unwrap());
    assert_eq!(first(&run), (Bottleneck::Straggler, 1.98));
    assert!(Diagnosis::of(&run).findings[0].evidence[0].contains("rank 1"));
}

#[test]
fn what_is_done_now_and_then_and_a_full_machine_are_told_of() {
    let mut now_and_then = run(&[(Phase::Forward, 5.0), (Phase::Other, 5.0)]);
    let other = Phase::ALL.iter().position(|phase| *phase == Phase::Other).unwrap();
    now_and_then.profiled.as_mut().unwrap().phases[other].seconds = 0.0;
    assert_eq!(first(&now_and_then), (Bottleneck::HostCode, 2.0));
    assert!(Diagnosis::of(&now_and_then).findings[0].evidence[0].contains("now and then"));
    let full = with_samples(run(&ALL_FORWARD), |number| {
        let queued =
            json!([{ "id": 7, "name": "train", "cpu_seconds": 0.05 * number, "queued_seconds": 0.05 * number }]);
        json!({ "threads": queued })
    });
    let diagnosis = Diagnosis::of(&full);
    assert!(diagnosis.findings.is_empty() && diagnosis.unknown[0].contains("50% of the time"), "{diagnosis}");
    // Figures that cannot be are no reason to panic.
    let mut absurd = now_and_then;
    for phase in &mut absurd.steps.as_mut().unwrap().phases {
        phase.share = -0.5;
    }
    let _ = Diagnosis::of(&absurd).to_string();
}

#[test]
fn a_record_of_nothing_says_so() {
    let nothing = Diagnosis::of(&RunProfile::default());
    assert_eq!((nothing.bound_by, nothing.findings.len()), (None, 0));
    assert!(nothing.to_string().contains("no step was timed"), "{nothing}");
    let mut unseen = run(&ALL_FORWARD);
    unseen.profiled = None;
    let text = Diagnosis::of(&unseen).to_string();
    assert!(text.contains("not known") && text.contains("no step was profiled"), "{text}");
}
