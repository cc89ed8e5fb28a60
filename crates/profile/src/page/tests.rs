//! Tests of [`super`].

use std::collections::BTreeMap;

use overdrive_core::{MemoryForecast, MemoryTechnique, MemoryUse};

use super::*;
use crate::run::{HostGap, MachineInfo, OpTimes, PhaseTimes, ProfiledSteps, ScopeTimes, StepTimes};
use crate::{
    Bottleneck, DeviceReport, Finding, GapSource, GpuSample, MemoryTimeline, MonitorGap, Phase, PhaseReport,
    ProcessSample, Rates, Sample, StepReport, SystemSample, ThreadSample, ThrottleReason,
};

/// Text that would be executed if it were not escaped.
const EVIL: &str = "<script>alert('x')</script> & \"{{style}}\"";

fn phases(scale: f64) -> Vec<PhaseReport> {
    let share = |phase: Phase| (phase as usize + 1) as f64 / 28.0;
    let report = |phase: Phase| PhaseReport {
        phase,
        total_seconds: scale * share(phase),
        median_seconds: 0.01 * scale * share(phase),
        p95_seconds: 0.012 * scale * share(phase),
        share: share(phase),
    };
    Phase::ALL.map(report).into()
}

fn report(scale: f64) -> StepReport {
    StepReport {
        steps: 100,
        steps_seen: 136,
        total_seconds: scale,
        median_seconds: 0.01 * scale,
        p95_seconds: 0.012 * scale,
        phases: phases(scale),
        device: Some(DeviceReport { steps: 99, phases: phases(scale), lost_steps: 1 }),
        samples_per_second: 3200.0,
        tokens_per_second: Some(1.5e6),
        mfu: Some(0.41),
        clock_jumps: 2,
        device_fault: Some(EVIL.to_owned()),
    }
}

fn sample(second: usize) -> Sample {
    let rates = Some(Rates { cpus_busy: Some(1.5), disk_read_bytes_per_second: Some(2e6), ..Rates::default() });
    Sample {
        elapsed_seconds: second as f64,
        system: Some(SystemSample { cpus: 8, rates, ..SystemSample::default() }),
        process: (second != 3).then(|| ProcessSample {
            resident_memory_bytes: 1_000_000_000 + 10_000_000 * second as u64,
            rates,
            ..ProcessSample::default()
        }),
        gpus: vec![GpuSample {
            index: 0,
            name: EVIL.to_owned(),
            utilization: Some(0.8),
            memory_used_bytes: Some(20_000_000_000),
            temperature_celsius: Some(71.0),
            throttle_reasons: vec![ThrottleReason::PowerCap],
            ..GpuSample::default()
        }],
        threads: vec![ThreadSample {
            id: 7,
            name: EVIL.to_owned(),
            cpu_seconds: 0.5 * second as f64,
            queued_seconds: 0.1 * second as f64,
        }],
        ..Sample::default()
    }
}

/// A run with every field filled.
fn full() -> RunProfile {
    let evil = || EVIL.to_owned();
    let gap = || HostGap {
        phase: Phase::Other,
        scope: Some(evil()),
        calls: 1.5,
        seconds: 0.002,
        typical_seconds: Some(0.002),
        operators: 0.0,
    };
    let scope = || ScopeTimes { name: evil(), calls: 2.0, seconds: 0.001, is_main_thread: true };
    let step = |step: u64| StepTimes {
        step,
        host_seconds: vec![0.001; Phase::ALL.len()],
        device_seconds: (step != 4).then(|| vec![0.0011; Phase::ALL.len()]),
        samples: 32,
        is_profiled: (30..36).contains(&step),
        ..StepTimes::default()
    };
    RunProfile {
        command: vec![format!("/usr/bin/{EVIL}"), evil()],
        world_size: 3,
        unix_seconds: 1_769_850_300.0,
        machine: MachineInfo {
            host: evil(),
            system: "Linux 6".to_owned(),
            cpus: 8,
            torch_threads: 1,
            device: "cuda:0".to_owned(),
            gpu: Some(evil()),
            gpu_capability: Some((9, 0)),
        },
        timer_thread: 7,
        steps: Some(report(1.0)),
        step_times: (0..136).map(step).collect(),
        ranks: vec![report(1.0), report(1.0), report(2.0)],
        profiled: Some(ProfiledSteps {
            steps: 5,
            step_seconds: 0.012,
            queued_seconds: Some(0.0),
            phases: vec![PhaseTimes {
                phase: Phase::Forward,
                seconds: 0.002,
                operator_seconds: 0.001,
                operators: 17.0,
                calls: 0.0,
                small_calls: 0.0,
                small_call_seconds: 0.0,
                short_pause_seconds: 0.0,
                communication_seconds: 0.0,
                exchange_operator_seconds: 0.0,
            }],
            ops: vec![OpTimes {
                name: evil(),
                phase: Phase::Forward,
                scope: Some(evil()),
                calls: 3.0,
                self_cpu_seconds: 0.001,
                device_seconds: 0.002,
                flops: 1.25e9,
            }],
            scopes: vec![scope()],
            gaps: vec![gap()],
            read_backs: vec![gap()],
            device_work: vec![scope()],
            device_busy_seconds: Some(0.004),
            kept_bytes: BTreeMap::new(),
            memory: vec![MemoryTimeline {
                device: evil(),
                times_ns: vec![0, 1_000_000],
                changes: vec![-100, 300],
                in_use: vec![-100, 200],
            }],
        }),
        samples: (0..10).map(sample).collect(),
        gaps: vec![MonitorGap { source: GapSource::Gpus, from_seconds: 0.5, to_seconds: None, reason: evil() }],
        notes: vec![evil()],
        memory_forecast: Some(forecast()),
        ..RunProfile::default()
    }
}

fn forecast() -> MemoryForecast {
    let used = |name: &str, bytes: &[u64]| MemoryUse { name: name.to_owned(), at_peak: bytes[1], bytes: bytes.into() };
    let mut forecast = MemoryForecast::default();
    (forecast.device, forecast.batch_size, forecast.peak_bytes) = (EVIL.to_owned(), 8, 4_000_000);
    forecast.limit_bytes = Some(3_000_000);
    forecast.uses = vec![used("activations", &[0, 3_000_000, 10]), used(EVIL, &[1_000_000; 3])];
    forecast.seconds = vec![0.0, 0.1, 0.2];
    let technique = MemoryTechnique { name: EVIL.to_owned(), peak_bytes: 2_000_000, is_rough: true };
    forecast.techniques = vec![technique];
    forecast
}

fn found() -> Diagnosis {
    let evil = || EVIL.to_owned();
    Diagnosis {
        bound_by: Some(Bottleneck::HostCode),
        findings: vec![Finding {
            bottleneck: Bottleneck::HostCode,
            seconds_per_step: 0.005,
            share: 0.5,
            bytes_per_step: 0.0,
            scope: Some(evil()),
            op: Some(evil()),
            evidence: vec![evil(), evil()],
            remedy: evil(),
        }],
        unknown: vec![format!("not seen: {}", evil())],
    }
}

fn nothing() -> Diagnosis {
    Diagnosis { bound_by: None, findings: Vec::new(), unknown: Vec::new() }
}

/// Checks that the page loads nothing from outside, has no invalid numbers or template names, and that its elements
/// nest.
fn check(page: &str) {
    for outside in ["http:", "https:", "@import", "url(", "NaN", "inf%", "\"inf", "{{title", "{{sections"] {
        assert!(!page.contains(outside), "{outside} is in the page");
    }
    let body = page.split_once("</style>").unwrap().1.split_once("<script>").unwrap().0;
    let mut open = vec!["head", "html"];
    open.swap(0, 1);
    for tag in body.split('<').skip(1).map(|rest| rest.split('>').next().unwrap_or_default()) {
        let name = tag.split([' ', '\n', '/']).next().unwrap_or_default();
        match tag.strip_prefix('/') {
            Some(closed) => assert_eq!(open.pop(), Some(closed), "in <{tag}>"),
            None if tag.ends_with('/') => {}
            None => open.push(name),
        }
    }
    assert_eq!(open, ["html", "body"]);
}

#[test]
fn the_page_loads_nothing_and_has_every_part() {
    let page = full().html(&found());
    check(&page);
    for part in [
        "Bound by the program&#39;s own code on the host",
        "without it up to <b>2.00\u{d7}</b> as fast",
        "2026-01-31 09:05 UTC",
        "1.50 M</dd>",
        "On the device",
        "Each bar is the mean of 2 steps.",
        "6 steps under the profiler",
        ">Operators<",
        "1.25 G",
        ">Scopes<",
        ">Gaps of the host<",
        ">Numbers read out of tensors<",
        "Memory of tensors in the profiled steps",
        "Busy CPUs",
        ">What memory is used for<",
        "<polygon class=\"forward\"",
        "about 2.00 MB",
        "not enough for one sample",
        "GPU utilisation",
        ">Ranks<",
        "(training)",
        "Not judged:",
        "Not sampled, from 500 ms to the end: GPUs:",
        "The clock ran backwards 2 times",
    ] {
        assert!(page.contains(part), "{part:?} is missing");
    }
    // The slow rank, in every phase but communication.
    assert!(page.matches("class=\"marked\"").count() >= 6);
}

#[test]
fn a_finding_without_a_known_cost_promises_no_gain() {
    let page = |bottleneck: Bottleneck| {
        let mut found = found();
        (found.findings[0].bottleneck, found.findings[0].share) = (bottleneck, 0.0);
        full().html(&found)
    };
    assert!(page(Bottleneck::MemoryCapacity).contains("<span>its cost is not known</span>"));
    assert!(page(Bottleneck::MemoryGrowth).contains("<span>it will end the run</span>"));
    assert!(!page(Bottleneck::MemoryCapacity).contains("as fast"));
}

#[test]
fn text_from_outside_is_never_markup() {
    let page = full().html(&found());
    assert_eq!(page.matches("<script").count(), 1, "only the page's own");
    assert!(!page.contains("alert('x')"));
    let escaped = "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &amp; &quot;{{style}}&quot;";
    // Title, command, host, GPU, operator, scopes, gaps, thread, finding, notes.
    assert!(page.matches(escaped).count() >= 18, "{}", page.matches(escaped).count());
}

#[test]
fn an_empty_record_gives_a_page_that_says_so() {
    let page = RunProfile::default().html(&nothing());
    check(&page);
    for part in [
        "The record is not enough",
        "No step was timed",
        "No step was recorded.",
        "No step was profiled",
        "No data: the run was too short",
        "No thread was sampled twice.",
    ] {
        assert!(page.contains(part), "{part:?} is missing");
    }
}

#[test]
fn a_page_is_made_whatever_is_missing() {
    let parts: [fn(&mut RunProfile); 12] = [
        |run| run.command.clear(),
        |run| run.steps = None,
        |run| run.step_times.clear(),
        |run| run.step_times.truncate(1),
        |run| run.step_times.iter_mut().for_each(|step| step.is_profiled = true),
        |run| run.step_times.iter_mut().for_each(|step| step.host_seconds.clear()),
        |run| run.step_times.iter_mut().for_each(|step| step.host_seconds = vec![0.0; 7]),
        |run| run.ranks.clear(),
        |run| run.profiled = Some(ProfiledSteps::default()),
        |run| run.profiled = None,
        |run| run.samples.truncate(1),
        |run| run.samples.iter_mut().for_each(|sample| *sample = Sample::default()),
    ];
    for part in parts {
        let mut run = full();
        part(&mut run);
        check(&run.html(&found()));
    }
}

#[test]
fn invalid_figures_do_no_harm() {
    let mut run = full();
    run.step_times[5].host_seconds = vec![f64::INFINITY, -1.0, f64::NAN, 1e300];
    run.samples[2].elapsed_seconds = -5.0;
    run.samples[4].gpus[0].utilization = Some(f64::NAN);
    run.samples[5].gpus[0].power_watts = Some(-3.0);
    check(&run.html(&found()));
}

#[test]
fn the_page_does_not_grow_with_the_number_of_steps() {
    let page = |count: u64| {
        let mut run = full();
        let step = run.step_times[0].clone();
        run.step_times = (0..count).map(|number| StepTimes { step: number, ..step.clone() }).collect();
        run.html(&found()).len() as f64
    };
    assert!(page(100_000) < 1.2 * page(1_000));
}

#[test]
fn a_slow_step_does_not_flatten_the_others() {
    let steps = |slow: f64| {
        let mut run = full();
        run.step_times.truncate(20);
        run.step_times[10].host_seconds = vec![slow; Phase::ALL.len()];
        run.html(&found())
    };
    assert!(!steps(0.002).contains("class=\"cut\""));
    assert_eq!(steps(1.0).matches("class=\"cut\"").count(), 1);
}
