//! Diagnoses of made-up runs on GPUs, with the names that libtorch's profiler uses for GPU work.

use overdrive_profile::{Bottleneck, Diagnosis, Phase, RunProfile};
use serde_json::{Value, json};

use crate::made_up::{ALL_FORWARD, finding, first, on_gpu, op, process, with_ops, with_samples};

/// Adds samples of two GPUs: the first never changes, the second has these figures by sample number.
fn with_two_gpus(run: RunProfile, second: impl Fn(f64) -> Value) -> RunProfile {
    with_samples(run, move |number| {
        let gpu = |index: u32, figures: Value| {
            let mut gpu = json!({ "index": index, "name": "H", "throttle_reasons": [], "processes": [],
                                  "memory_used_bytes": 2_000_000_000_u64, "memory_total_bytes": 8_000_000_000_u64,
                                  "sm_clock_hertz": 1.9e9 });
            gpu.as_object_mut().unwrap().append(&mut figures.as_object().unwrap().clone());
            gpu
        };
        json!({ "gpus": [gpu(0, json!({})), gpu(1, second(number))], "process": process(1e9, 0.0) })
    })
}

fn busy() -> RunProfile {
    on_gpu(&ALL_FORWARD, 0.01, &[])
}

#[test]
fn the_gpu_whose_memory_grows_is_named() {
    let grows = |number: f64| json!({ "memory_used_bytes": (4e9 + 1e8 * number) as u64 });
    let found = finding(&with_two_gpus(busy(), grows));
    assert_eq!(found.bottleneck, Bottleneck::MemoryGrowth);
    // A gigabyte per second, in steps of 10 ms; the rest of 8 GB is free.
    assert!(found.evidence[0].contains("GPU 1 grows steadily by 10.000 MB per step"), "{found}");
    assert!(found.evidence[1].starts_with("3.1 GB are free"), "{found}");
    assert!((found.bytes_per_step - 1e7).abs() < 1.0);
    assert_eq!(Diagnosis::of(&with_two_gpus(busy(), |_| json!({}))).findings, []);
}

#[test]
fn the_gpu_that_is_throttled_is_named_by_its_own_clock() {
    // The first GPU's higher clock does not matter for the second.
    let hot = |number: f64| match number >= 5.0 {
        true => json!({ "sm_clock_hertz": 0.6e9, "throttle_reasons": ["sync_boost", "hardware_thermal"] }),
        false => json!({ "sm_clock_hertz": 1.2e9 }),
    };
    let run = with_two_gpus(busy(), hot);
    assert_eq!(first(&run), (Bottleneck::Throttling, 1.33));
    let found = finding(&run);
    assert_eq!(found.evidence, ["for 50% of the time the clock of GPU 1 is at 600 of 1200 MHz: hardware_thermal"]);
}

#[test]
fn copies_from_pageable_memory_are_found_without_a_marked_phase() {
    let copies = [("Memcpy HtoD (Pageable -> Device)", 5.0), ("ampere_bf16_s16816gemm_bf16_128x64_ldg8", 5.0)];
    let ops = |scope| {
        vec![
            op("aten::copy_", Phase::Forward, scope, 1.0, (1.0, 5.0)),
            op("cudaMemcpyAsync", Phase::Forward, scope, 1.0, (3.0, 0.0)),
            op("cudaStreamSynchronize", Phase::Forward, scope, 1.0, (2.0, 0.0)),
            op("aten::mm", Phase::Forward, None, 1.0, (0.1, 5.0)),
        ]
    };
    let found = finding(&with_ops(on_gpu(&ALL_FORWARD, 0.0095, &copies), ops(Some("batch to device"))));
    assert_eq!((found.bottleneck, found.scope.as_deref()), (Bottleneck::HostToDevice, Some("batch to device")));
    assert_eq!(found.op.as_deref(), Some("Memcpy HtoD (Pageable -> Device)"));
    assert!(found.remedy.contains(".pin_memory(true)"), "{found}");
    let pinned = [("Memcpy HtoD (Pinned -> Device)", 5.0), copies[1]];
    assert_eq!(Diagnosis::of(&with_ops(on_gpu(&ALL_FORWARD, 0.0095, &pinned), ops(None))).findings, []);
}

#[test]
fn a_phase_of_copies_from_pinned_memory_needs_another_remedy() {
    let phases = [(Phase::HostToDevice, 5.0), (Phase::Forward, 5.0)];
    let found = finding(&on_gpu(&phases, 0.01, &[("Memcpy HtoD (Pinned -> Device)", 5.0)]));
    assert_eq!(found.op.as_deref(), Some("Memcpy HtoD (Pinned -> Device)"));
    assert!(!found.remedy.contains("pin_memory") && found.remedy.contains("`.to_device(device)`"), "{found}");
}

#[test]
fn copies_to_the_host_and_back_are_not_reported_as_missing_pinning() {
    let copies = [("Memcpy DtoH (Device -> Pageable)", 2.5), ("Memcpy HtoD (Pageable -> Device)", 2.5)];
    let scope = Some("offload");
    let ops = vec![op("aten::copy_", Phase::Forward, scope, 2.0, (1.0, 5.0))];
    let run = with_ops(on_gpu(&ALL_FORWARD, 0.0098, &copies), ops);
    let diagnosis = Diagnosis::of(&run);
    assert_eq!(diagnosis.findings.len(), 1, "{diagnosis}");
    assert_eq!((finding(&run).bottleneck, finding(&run).scope.as_deref()), (Bottleneck::Offload, scope));
}

#[test]
fn tensor_cores_are_checked_on_each_gpu() {
    let single = [("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_ffma_aligna4_alignc4", 9.0)];
    // The backward pass is in no scope; the scope of the forward pass is used.
    let ops = vec![
        op("aten::addmm", Phase::Forward, Some("head"), 2.0, (0.1, 3.0)),
        op("aten::mm", Phase::Backward, None, 4.0, (0.2, 6.0)),
    ];
    let run = with_ops(on_gpu(&ALL_FORWARD, 0.0098, &single), ops);
    let found = finding(&with_two_gpus(run, |_| json!({ "tensor_utilization": 0.02 })));
    assert_eq!((found.bottleneck, found.scope.as_deref()), (Bottleneck::Float32Matmul, Some("head")));
    assert_eq!(found.evidence[1..], ["the tensor cores of GPU 1 are busy for 2% of the time"]);
}

#[test]
fn waits_are_distinguished_from_launches() {
    let half = [("void at::native::vectorized_elementwise_kernel<4, ..>", 5.0)];
    let with = |ops| with_ops(on_gpu(&ALL_FORWARD, 0.005, &half), ops);
    let launch = || op("cudaLaunchKernel", Phase::Forward, Some("cells"), 900.0, (4.0, 0.0));
    let found = finding(&with(vec![launch(), op("cudaMemcpyAsync", Phase::Other, None, 1.0, (0.1, 0.0))]));
    assert_eq!((found.bottleneck, found.op.as_deref()), (Bottleneck::KernelLaunches, Some("cudaLaunchKernel")));
    assert!(found.scope.as_deref() == Some("cells") && found.evidence[2].starts_with("900 calls"), "{found}");
    // Reading a number out of a tensor on the host is not a wait.
    let on_host = op("aten::_local_scalar_dense", Phase::Other, None, 1.0, (0.1, 0.0));
    assert_eq!(finding(&with(vec![launch(), on_host.clone()])).bottleneck, Bottleneck::KernelLaunches);
    // Waits in two scopes, neither of them in each step.
    let wait = |scope, calls, ms| op("cudaStreamSynchronize", Phase::Other, Some(scope), calls, (ms, 0.0));
    let read = op("aten::_local_scalar_dense", Phase::Other, Some("metrics"), 0.8, (0.1, 0.0));
    let found = finding(&with(vec![launch(), wait("metrics", 0.8, 3.0), wait("checks", 0.2, 0.5), read]));
    assert_eq!((found.bottleneck, found.scope.as_deref()), (Bottleneck::HostSync, Some("metrics")));
    assert_eq!(found.op.as_deref(), Some("aten::item"));
    let found = finding(&with(vec![launch(), wait("masks", 1.0, 3.0)]));
    assert_eq!(found.op.as_deref(), Some("cudaStreamSynchronize"));
    assert!(found.remedy.contains("nonzero"), "{found}");
    // Waits in the data wait belong to another finding.
    let loading = op("cudaEventSynchronize_v3020", Phase::DataWait, None, 1.0, (0.1, 0.0));
    assert_eq!(finding(&with(vec![launch(), loading])).bottleneck, Bottleneck::KernelLaunches);
}

#[test]
fn a_lack_of_memory_is_reported_with_the_scope_that_allocates() {
    let mut short = with_two_gpus(busy(), |_| json!({ "memory_used_bytes": 7_900_000_000_u64 }));
    short.alloc_retries = Some(3);
    let ops = vec![
        op("cudaMalloc", Phase::Forward, Some("attention"), 2.0, (1.0, 0.0)),
        op("aten::mm", Phase::Forward, None, 90.0, (5.0, 5.0)),
    ];
    let found = finding(&with_ops(short, ops));
    assert_eq!((found.bottleneck, found.op.as_deref()), (Bottleneck::MemoryCapacity, Some("cudaMalloc")));
    assert_eq!(found.scope.as_deref(), Some("attention"));
    assert!(found.evidence[2].contains("GPU 1 was 99% full"), "{found}");
}

#[test]
fn a_loop_bound_by_launches_stays_so_with_one_read_a_step() {
    let half = [("void at::native::vectorized_elementwise_kernel<4, ..>", 5.0)];
    let launch = op("cudaLaunchKernel", Phase::Forward, Some("cells"), 900.0, (4.0, 0.0));
    let read = op("aten::_local_scalar_dense", Phase::Other, Some("metrics"), 1.0, (0.1, 0.0));
    // The host waits for 0.2 ms of a step of 10 ms, and the device is idle for 5 ms.
    let wait = |ms| op("cudaStreamSynchronize", Phase::Other, Some("metrics"), 1.0, (ms, 0.0));
    let with = |ms| with_ops(on_gpu(&ALL_FORWARD, 0.005, &half), vec![launch.clone(), wait(ms), read.clone()]);
    let diagnosis = Diagnosis::of(&with(0.2));
    let found: Vec<_> = diagnosis.findings.iter().map(|it| (it.bottleneck, (100.0 * it.share).round())).collect();
    assert_eq!(found, [(Bottleneck::KernelLaunches, 48.0)], "{diagnosis}");
    // With a longer wait, both cost: together, what the device is idle for.
    let diagnosis = Diagnosis::of(&with(3.0));
    let found: Vec<_> = diagnosis.findings.iter().map(|it| (it.bottleneck, (100.0 * it.share).round())).collect();
    assert_eq!(found, [(Bottleneck::HostSync, 30.0), (Bottleneck::KernelLaunches, 20.0)], "{diagnosis}");
    // Waits that are longer than the device is idle: without them, the device would be busy all the time.
    let diagnosis = Diagnosis::of(&with(8.0));
    assert_eq!(diagnosis.findings.len(), 1, "{diagnosis}");
    assert_eq!((diagnosis.findings[0].bottleneck, diagnosis.findings[0].share), (Bottleneck::HostSync, 0.5));
}

#[test]
fn calls_that_keep_the_host_from_launching_are_told_apart() {
    let half = [("void at::native::vectorized_elementwise_kernel<4, ..>", 5.0)];
    for (call, calls, bottleneck, evidence, remedy) in [
        ("cudaEventQuery", 4000.0, Bottleneck::HostSync, "asks whether the device is done 4000 times", "in a loop"),
        ("cudaStreamQuery", 4000.0, Bottleneck::HostSync, "asks whether the device is done", "in a loop"),
        ("cudaFree_v3020", 2.0, Bottleneck::DriverMemory, "device memory", "empty_cache"),
        ("cudaMalloc", 3.0, Bottleneck::DriverMemory, "may wait for the device, 3 times per step", "empty_cache"),
        ("cudaHostAlloc", 1.0, Bottleneck::DriverMemory, "pinned memory", "pin memory once"),
        ("cudaFreeHost", 1.0, Bottleneck::DriverMemory, "pinned memory", "pin memory once"),
    ] {
        let launch = op("cudaLaunchKernel", Phase::Forward, Some("cells"), 60.0, (0.4, 0.0));
        let other = |phase| op(call, phase, Some("buffers"), calls, (4.5, 0.0));
        let with = |phase| with_ops(on_gpu(&ALL_FORWARD, 0.005, &half), vec![launch.clone(), other(phase)]);
        let found = finding(&with(Phase::Forward));
        assert_eq!((found.bottleneck, found.scope.as_deref()), (bottleneck, Some("buffers")), "{found}");
        assert_eq!((found.op.as_deref(), (100.0 * found.share).round()), (Some(call), 45.0), "{found}");
        assert!(found.evidence[1].contains(evidence) && found.remedy.contains(remedy), "{found}");
        // Those of the loader belong to another finding.
        assert_eq!(finding(&with(Phase::DataWait)).bottleneck, Bottleneck::KernelLaunches);
    }
    // What is left of the idle time is for launches.
    let free = op("cudaFree", Phase::Forward, None, 1.0, (2.0, 0.0));
    let diagnosis = Diagnosis::of(&with_ops(on_gpu(&ALL_FORWARD, 0.005, &half), vec![free]));
    let found: Vec<_> = diagnosis.findings.iter().map(|it| (it.bottleneck, (100.0 * it.share).round())).collect();
    assert_eq!(found, [(Bottleneck::KernelLaunches, 30.0), (Bottleneck::DriverMemory, 20.0)], "{diagnosis}");
}

#[test]
fn a_copy_of_pageable_memory_is_a_wait() {
    let with = |copy, calls, ms| {
        let work = [("void at::native::vectorized_elementwise_kernel<4, ..>", 4.9), (copy, 0.1)];
        let scope = Some("metrics");
        let ops = vec![
            op("cudaLaunchKernel", Phase::Forward, Some("cells"), 60.0, (0.4, 0.0)),
            op("cudaMemcpyAsync", Phase::Other, scope, calls, (ms, 0.1)),
            op("cudaStreamSynchronize", Phase::Other, scope, 1.0, (0.002, 0.0)),
        ];
        finding(&with_ops(on_gpu(&ALL_FORWARD, 0.005, &work), ops))
    };
    for copy in ["Memcpy DtoH (Device -> Pageable)", "Memcpy HtoD (Pageable -> Device)"] {
        let found = with(copy, 1.0, 4.5);
        assert_eq!((found.bottleneck, found.scope.as_deref()), (Bottleneck::HostSync, Some("metrics")), "{found}");
        assert_eq!((found.op.as_deref(), (100.0 * found.share).round()), (Some("cudaMemcpyAsync"), 45.0), "{found}");
        assert!(found.evidence[1].contains("waits for the device 1 times"), "{found}");
    }
    // One of pinned memory has waited for nothing, and calls that only put copies into a stream are short.
    assert_eq!(with("Memcpy DtoH (Device -> Pinned)", 1.0, 4.5).bottleneck, Bottleneck::KernelLaunches);
    assert_eq!(with("Memcpy DtoH (Device -> Pageable)", 900.0, 4.5).bottleneck, Bottleneck::KernelLaunches);
}

#[test]
fn waits_that_the_profilers_overhead_hides_are_found() {
    let half = [("void at::native::vectorized_elementwise_kernel<4, ..>", 5.0)];
    let phases = [(Phase::Forward, 5.0), (Phase::Other, 5.0)];
    let read = op("aten::_local_scalar_dense", Phase::Other, Some("metrics"), 1.0, (0.1, 0.0));
    let wait = op("cudaStreamSynchronize", Phase::Other, Some("metrics"), 1.0, (0.5, 0.0));
    let mut run = with_ops(on_gpu(&phases, 0.005, &half), vec![wait, read]);
    // Each of 1000 calls of the forward pass takes 2 us longer under the profiler; those of the other phase would as
    // well, and its wait is shorter by that.
    let profiled = run.profiled.as_mut().unwrap();
    profiled.phases[Phase::Forward as usize].seconds = 0.007;
    for phase in [Phase::Forward, Phase::Other] {
        profiled.phases[phase as usize].calls = 1000.0;
    }
    let found = finding(&run);
    assert_eq!((found.bottleneck, (100.0 * found.share).round()), (Bottleneck::HostSync, 25.0));
}

#[test]
fn only_what_the_gpu_can_multiply_is_recommended() {
    let single = [("volta_sgemm_128x64_nn", 9.0)];
    let of = |capability| {
        let mut run = on_gpu(&ALL_FORWARD, 0.0098, &single);
        run.machine.gpu_capability = capability;
        Diagnosis::of(&run).findings
    };
    assert_eq!(of(Some((6, 1))), []);
    let of_volta = of(Some((7, 0)))[0].remedy.clone();
    assert!(of_volta.contains("Kind::Half") && of_volta.contains("`GradScaler`"), "{of_volta}");
    assert!(!of_volta.contains("Kind::BFloat16") && !of_volta.contains("allow_tf32"), "{of_volta}");
    for newer in [Some((8, 0)), Some((9, 0)), Some((12, 0))] {
        let found = of(newer);
        assert!(found[0].remedy.contains("Kind::BFloat16") && found[0].remedy.contains("allow_tf32"), "{newer:?}");
        assert!(!found[0].remedy.contains("8.0"), "{newer:?}");
    }
    // Built without CUDA's headers: it may be any of these.
    let of_any = of(None)[0].remedy.clone();
    for part in ["From 8.0", "Kind::BFloat16", "allow_tf32", "With 7.x", "Kind::Half", "`GradScaler`"] {
        assert!(of_any.contains(part), "{of_any}");
    }
}
