//! Diagnoses of made-up runs, which need a GPU, several ranks or a bad machine.

use overdrive_profile::{Bottleneck, Diagnosis, Phase, ProfiledSteps, RunProfile, StepTimes};
use serde_json::json;

use crate::made_up::{ALL_FORWARD, first, on_gpu, process, report, run, system, threads, with_samples};

const HALF_DATA: [(Phase, f64); 2] = [(Phase::DataWait, 5.0), (Phase::Forward, 5.0)];

#[test]
fn workers_show_why_data_is_late() {
    let with = |main: f64, workers: &'static [f64]| {
        let seen = move |number| json!({ "threads": threads(number, main, workers) });
        first(&with_samples(run(&HALF_DATA), seen))
    };
    assert_eq!(with(0.5, &[0.1, 0.1]), (Bottleneck::SlowRead, 2.0));
    assert_eq!(with(0.5, &[0.95, 0.95, 0.95, 0.95]), (Bottleneck::SlowDecode, 2.0));
    assert_eq!(with(0.5, &[0.95]), (Bottleneck::TooFewWorkers, 2.0));
    assert_eq!(with(1.0, &[]), (Bottleneck::TooFewWorkers, 2.0));
    assert_eq!(with(0.5, &[]), (Bottleneck::SlowRead, 2.0));
    // The free CPUs, less than a tenth of all, cannot save enough: the work itself has to become less.
    let mut large = with_samples(run(&HALF_DATA), |number| json!({ "threads": threads(number, 0.5, &[0.9; 14]) }));
    large.machine.cpus = 14;
    assert_eq!(first(&large), (Bottleneck::SlowDecode, 2.0));
    // Threads with the program's name are libtorch's, so they do not count as loading.
    let blocked = with_samples(run(&HALF_DATA), |number| {
        let mut threads = threads(number, 0.5, &[0.9]);
        threads[1]["name"] = json!("train");
        json!({ "threads": threads })
    });
    assert_eq!(first(&blocked), (Bottleneck::SlowRead, 2.0));
    // Unless they are busier than the training thread: libtorch's are not.
    let unnamed = with_samples(run(&HALF_DATA), |number| {
        let mut threads = threads(number, 0.3, &[0.9]);
        threads[1]["name"] = json!("train");
        json!({ "threads": threads })
    });
    assert_eq!(first(&unnamed), (Bottleneck::TooFewWorkers, 2.0));
    // Three of four CPUs are busy: more workers could save a fourth of a step at best.
    assert_eq!(with(0.5, &[0.9, 0.9, 0.7]), (Bottleneck::TooFewWorkers, 1.33));
}

#[test]
fn a_gpu_shows_what_it_waits_for() {
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
    // The host waits for 4 ms; the last of 5 idle ones is the time to launch.
    assert_eq!(first(&waits), (Bottleneck::HostSync, 1.67));
    assert_eq!(Diagnosis::of(&waits).findings[0].scope.as_deref(), Some("metrics"));
    let mut short = on_gpu(&ALL_FORWARD, 0.01, &[]);
    short.alloc_retries = Some(3);
    assert_eq!(first(&short), (Bottleneck::MemoryCapacity, 1.0));
    // The tensor cores are used, and the device is never idle.
    let healthy = on_gpu(&ALL_FORWARD, 0.0098, &[("sm90_xmma_gemm_bf16bf16_bf16f32_f32", 9.0)]);
    assert_eq!(Diagnosis::of(&healthy).findings, []);
    assert_eq!(Diagnosis::of(&healthy).bound_by, Some(Bottleneck::Compute));
}

#[test]
fn throttled_clocks_are_named() {
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
fn the_profilers_overhead_is_subtracted() {
    // 10 ms, but 20 ms under the profiler, which adds 10 us to each of 1000 calls.
    let slowed = |set: &dyn Fn(&mut ProfiledSteps)| {
        let mut run = run(&ALL_FORWARD);
        let profiled = run.profiled.as_mut().unwrap();
        profiled.step_seconds = 0.02;
        let forward = &mut profiled.phases[Phase::Forward as usize];
        (forward.seconds, forward.operator_seconds, forward.calls) = (0.02, 0.02, 1000.0);
        set(profiled);
        first(&run)
    };
    let read_backs = |operators: f64, queued_seconds: f64| {
        let read_back =
            json!({ "phase": "forward", "scope": null, "calls": 100.0, "seconds": 0.01, "operators": operators });
        slowed(&|profiled: &mut ProfiledSteps| {
            profiled.read_backs = vec![serde_json::from_value(read_back.clone()).unwrap()];
            profiled.queued_seconds = Some(queued_seconds);
        })
    };
    // 10 ms less 5 ms of the profiler's overhead.
    assert_eq!(read_backs(500.0, 0.0), (Bottleneck::HostLoop, 2.0));
    // 6 of the 20 ms were waiting for a CPU: so 7 ms of the loop less 900 times 4 us.
    assert_eq!(read_backs(900.0, 0.006), (Bottleneck::HostLoop, 1.52));
    let small = |profiled: &mut ProfiledSteps| {
        let forward = &mut profiled.phases[Phase::Forward as usize];
        (forward.small_calls, forward.small_call_seconds) = (1000.0, 0.01);
    };
    assert_eq!(slowed(&small), (Bottleneck::KernelLaunches, 2.0));
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
    assert!(evidence[0].contains("2.000 MB per step") && evidence[1].contains("2000 more steps"), "{evidence:?}");
    // Steps ran during only two of the ten samples; later growth does not count.
    let mut afterwards = leak;
    afterwards.step_times = vec![StepTimes::default(); 15];
    for (number, step) in afterwards.step_times.iter_mut().enumerate() {
        (step.start_seconds, step.host_seconds) = (0.01 * number as f64, vec![0.01]);
    }
    assert_eq!(first(&afterwards).0, Bottleneck::TooFewWorkers);
    let settles = with(|number| 1e9 + 2e8 * (1.0 - (-number).exp()));
    assert_eq!(first(&settles).0, Bottleneck::TooFewWorkers);
    // Growth that ends after two thirds of the time does not count, although a line fits all of it.
    let ends = |number: f64| 1e9 + 4e7 * number.min(6.0) + 2e6 * number;
    assert_eq!(first(&with(ends)).0, Bottleneck::TooFewWorkers);
    // Pages of mapped files are not the process's memory.
    let mapped = with_samples(run(&HALF_DATA), |number| {
        let mut process = process(1e9 + 2e7 * number, 0.0);
        process["anonymous_memory_bytes"] = json!(1_000_000_000_u64);
        json!({ "process": process, "system": system(1.0), "threads": threads(number, 1.0, &[]) })
    });
    assert_eq!(first(&mapped).0, Bottleneck::TooFewWorkers);
    // The profiler's own memory is not a leak, but a leak that continues at the same time is found.
    let profiled_from = |resident: fn(f64) -> f64, steps: std::ops::Range<usize>| {
        let mut run = with(resident);
        run.step_times = vec![StepTimes::default(); 90];
        for (number, step) in run.step_times.iter_mut().enumerate() {
            (step.start_seconds, step.host_seconds) = (0.01 * number as f64, vec![0.01]);
            step.is_profiled = steps.contains(&number);
        }
        first(&run).0
    };
    let during = |number: f64| 1e9 + 5e7 * (number - 1.0).clamp(0.0, 7.0);
    assert_eq!(profiled_from(during, 10..80), Bottleneck::TooFewWorkers);
    assert_eq!(profiled_from(during, 0..0), Bottleneck::MemoryGrowth);
    assert_eq!(profiled_from(|number| 1e9 + 2e7 * number, 30..31), Bottleneck::MemoryGrowth);
    // A cache stops growing by itself, if there is room: it needs 20 MB for each of 100 samples, and 4 GB are free.
    let with_cache = |wanted: u64| {
        with_samples(run(&HALF_DATA), move |number| {
            json!({ "process": process(1e9 + 2e7 * number, 0.0), "system": system(1.0),
                    "caches": { "kept": number as u64, "wanted": wanted }, "threads": threads(number, 1.0, &[]) })
        })
    };
    let (fits, does_not) = (with_cache(100), with_cache(1000));
    assert_eq!(first(&fits).0, Bottleneck::TooFewWorkers);
    let notes = Diagnosis::of(&fits).unknown;
    assert!(notes.iter().any(|it| it.contains("9 of 100 samples are in memory, the rest needs 1.8 GB")), "{notes:?}");
    assert_eq!(first(&does_not), (Bottleneck::MemoryGrowth, 1.0));
    let finding = &Diagnosis::of(&does_not).findings[0];
    assert!(finding.evidence[2].contains("the rest needs 19.8 GB, and 4.0 GB are free"), "{finding}");
    assert!(finding.remedy.contains("with_budget"), "{finding}");
    // A cache that is full does not explain growth.
    let mut full = with_cache(100);
    full.samples.iter_mut().for_each(|sample| sample.caches = fits.samples[9].caches);
    assert_eq!(first(&full), (Bottleneck::MemoryGrowth, 1.0));
    let swapped = with_samples(
        run(&ALL_FORWARD),
        |number| json!({ "process": process(1e9, 500.0), "threads": threads(number, 0.4, &[]) }),
    );
    assert_eq!(first(&swapped), (Bottleneck::MemoryCapacity, 2.5));
}

#[test]
fn a_step_that_will_not_fit_is_told_what_would() {
    let technique =
        |name: &str, peak_bytes: u64, is_rough| json!({ "name": name, "peak_bytes": peak_bytes, "is_rough": is_rough });
    let mut large = run(&ALL_FORWARD);
    let forecast = json!({
        "device": "CUDA device 0", "batch_size": 64, "peak_bytes": 9e9 as u64, "limit_bytes": 8e9 as u64,
        "largest_batch": 50, "seconds": [0.0, 1.0],
        "uses": [{ "name": "activations", "at_peak": 7e9 as u64, "bytes": [0, 7e9 as u64] }],
        "techniques": [technique("micro-batches of 32", 5e9 as u64, false), technique("autocast", 85e8 as u64, true)],
    });
    large.memory_forecast = Some(serde_json::from_value(forecast).unwrap());
    assert_eq!(first(&large).0, Bottleneck::MemoryCapacity);
    let finding = &Diagnosis::of(&large).findings[0];
    assert_eq!(finding.remedy, "one of these: micro-batches of 32 (5.00 GB)");
    assert!(finding.evidence[0].contains("9.00 GB on CUDA device 0, which may have 8.00 GB"), "{finding}");
    assert!(finding.evidence[1].contains("7.00 GB of it are activations"), "{finding}");
    assert!(finding.evidence[2].contains("batches of up to 50 fit"), "{finding}");
    let forecast = large.memory_forecast.as_mut().unwrap();
    forecast.techniques.clear();
    assert!(Diagnosis::of(&large).findings[0].remedy.contains("no single technique fits"));
    large.memory_forecast.as_mut().unwrap().limit_bytes = Some(9e9 as u64);
    assert_eq!(Diagnosis::of(&large).findings, []);
}

#[test]
fn slow_ranks_and_communication_are_found() {
    let mut slow = run(&[(Phase::Forward, 4.0), (Phase::Communication, 6.0)]);
    (slow.world_size, slow.ranks) = (2, vec![slow.steps.clone().unwrap()]);
    let other = report(&[(Phase::Forward, 9.0), (Phase::Communication, 1.0)]);
    slow.ranks.push(serde_json::from_value(other).unwrap());
    assert_eq!(first(&slow), (Bottleneck::Straggler, 2.0));
    assert!(Diagnosis::of(&slow).findings[0].evidence[0].contains("rank 1"));
    // If rank 1 were as fast as the other, 1 ms of communication would be left, a tenth of a step.
    assert_eq!(Diagnosis::of(&slow).findings.len(), 2);
    let mut exchange = run(&[(Phase::Forward, 4.0), (Phase::Communication, 6.0)]);
    (exchange.world_size, exchange.ranks) = (2, vec![exchange.steps.clone().unwrap(); 2]);
    assert_eq!(first(&exchange), (Bottleneck::Communication, 2.5));
    let mut alone = exchange;
    alone.world_size = 1;
    assert_eq!(Diagnosis::of(&alone).findings, []);
}

#[test]
fn a_rank_that_waits_in_backward_is_not_the_slow_one() {
    let mut run = run(&[(Phase::Forward, 4.0), (Phase::Backward, 8.1)]);
    (run.world_size, run.ranks) = (2, vec![run.steps.clone().unwrap()]);
    let slow = report(&[(Phase::Forward, 10.0), (Phase::Backward, 2.0)]);
    run.ranks.push(serde_json::from_value(slow).unwrap());
    assert_eq!(first(&run), (Bottleneck::Straggler, 1.98));
    assert!(Diagnosis::of(&run).findings[0].evidence[0].contains("rank 1"));
}

#[test]
fn rare_work_and_a_busy_machine_are_reported() {
    let mut now_and_then = run(&[(Phase::Forward, 5.0), (Phase::Other, 5.0)]);
    let other = Phase::ALL.iter().position(|phase| *phase == Phase::Other).unwrap();
    now_and_then.profiled.as_mut().unwrap().phases[other].seconds = 0.0;
    assert_eq!(first(&now_and_then), (Bottleneck::HostCode, 2.0));
    assert!(Diagnosis::of(&now_and_then).findings[0].evidence[0].contains("now and then"));
    let half_queued = |number: f64| {
        let queued =
            json!([{ "id": 7, "name": "train", "cpu_seconds": 0.05 * number, "queued_seconds": 0.05 * number }]);
        json!({ "threads": queued })
    };
    let mut longer = run(&[(Phase::Forward, 8.5), (Phase::Other, 1.5)]);
    longer.profiled.as_mut().unwrap().phases[other].seconds = 0.0;
    assert_eq!(first(&longer), (Bottleneck::HostCode, 1.18));
    // Half of that was waiting for a CPU.
    assert_eq!(Diagnosis::of(&with_samples(longer, half_queued)).findings, []);
    let full = with_samples(run(&ALL_FORWARD), half_queued);
    let diagnosis = Diagnosis::of(&full);
    assert!(diagnosis.findings.is_empty() && diagnosis.unknown[0].contains("50% of the time"), "{diagnosis}");
    // Impossible figures do not cause a panic.
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
