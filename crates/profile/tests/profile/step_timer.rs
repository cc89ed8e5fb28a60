//! Steps and their phases, with a clock that the test controls.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use overdrive_profile::{Phase, ProfileError, Profiler, StepReport, StepTimer, StepTimerBuilder};
use tch::Device;

use crate::{alone, profile_of};

/// A clock in milliseconds. Phases are scopes, so no profiler may be on meanwhile.
pub struct Clock {
    now: Arc<AtomicU64>,
    _alone: MutexGuard<'static, ()>,
}

impl Clock {
    pub fn new() -> Self {
        Self { now: Arc::new(AtomicU64::new(1000)), _alone: alone() }
    }

    pub fn pass(&self, milliseconds: u64) {
        self.now.fetch_add(milliseconds, Ordering::Relaxed);
    }

    fn set_back(&self, milliseconds: u64) {
        self.now.fetch_sub(milliseconds, Ordering::Relaxed);
    }

    pub fn timer(&self) -> StepTimerBuilder {
        let now = self.now.clone();
        let clock = move || Duration::from_millis(now.load(Ordering::Relaxed));
        StepTimer::builder().warmup_steps(0).clock(clock)
    }
}

/// Milliseconds of the median step in each phase.
fn medians(report: &StepReport) -> [f64; 7] {
    Phase::ALL.map(|phase| (1e6 * report.phase(phase).expect("all phases").median_seconds).round() / 1e3)
}

#[test]
fn nested_phases_do_not_count_in_outer_ones() {
    let clock = Clock::new();
    let timer = clock.timer().build().unwrap();
    for _ in 0..3 {
        for batch in timer.batches([()]) {
            let () = batch;
        }
        {
            let _copy = timer.phase(Phase::HostToDevice);
            clock.pass(2);
        }
        {
            let _forward = timer.phase(Phase::Forward);
            clock.pass(10);
            {
                let _communication = timer.phase(Phase::Communication);
                clock.pass(3);
                let _nested = timer.phase(Phase::Forward);
                clock.pass(1);
            }
            clock.pass(4);
        }
        {
            let _backward = timer.phase(Phase::Backward);
            clock.pass(20);
        }
        clock.pass(5);
        {
            let _optimizer = timer.phase(Phase::Optimizer);
            clock.pass(6);
        }
        timer.step(8);
    }
    let report = timer.report().unwrap();
    assert_eq!(medians(&report), [0.0, 2.0, 15.0, 20.0, 6.0, 3.0, 5.0]);
    assert_eq!((report.steps, report.steps_seen, report.clock_jumps), (3, 3, 0));
    let total: f64 = report.phases.iter().map(|phase| phase.total_seconds).sum();
    let shares: f64 = report.phases.iter().map(|phase| phase.share).sum();
    assert!((total - 0.153).abs() < 1e-9 && (report.total_seconds - total).abs() < 1e-9, "{report:?}");
    assert!((shares - 1.0).abs() < 1e-9);
    assert!(report.device.is_none() && report.device_fault.is_none());
}

#[test]
fn waiting_for_batches_is_data_wait() {
    let clock = Clock::new();
    let timer = clock.timer().build().unwrap();
    let slow = (0..4).inspect(|_| clock.pass(7));
    let mut batches = timer.batches(slow);
    assert_eq!(batches.size_hint(), (4, Some(4)));
    for batch in batches.by_ref() {
        clock.pass(3);
        timer.step(batch + 1);
    }
    assert!(batches.next().is_none());
    let report = timer.report().unwrap();
    assert_eq!(report.steps, 4);
    assert_eq!(medians(&report), [7.0, 0.0, 0.0, 0.0, 0.0, 0.0, 3.0]);
    // 10 samples in 40 ms.
    assert!((report.samples_per_second - 250.0).abs() < 1e-6);
}

#[test]
fn the_warm_up_and_old_steps_are_left_out() {
    let clock = Clock::new();
    let timer = clock.timer().warmup_steps(5).window(100).build().unwrap();
    assert!(timer.report().is_none());
    let begin = timer.phase(Phase::Forward);
    for step in 0..305_u64 {
        assert_eq!(timer.report().is_none(), step <= 5);
        // The last 100 take 1 to 100 ms.
        clock.pass(if step < 205 { 5000 } else { step - 204 });
        timer.step(1);
    }
    drop(begin);
    let report = timer.report().unwrap();
    assert_eq!((report.steps, report.steps_seen), (100, 305));
    let forward = report.phase(Phase::Forward).unwrap();
    for (seconds, expected) in
        [(forward.median_seconds, 0.0505), (forward.p95_seconds, 0.09505), (forward.total_seconds, 5.05)]
    {
        assert!((seconds - expected).abs() < 1e-9, "{seconds} {expected}");
    }
    assert!((report.p95_seconds - 0.09505).abs() < 1e-9 && (report.median_seconds - 0.0505).abs() < 1e-9);
}

#[test]
fn rates_and_utilisation() {
    let clock = Clock::new();
    let timer = clock.timer().flops_per_step(2e9).peak_flops_per_second(1e12).build().unwrap();
    timer.step(99); // No step had begun; one begins now.
    for _ in 0..4 {
        clock.pass(5);
        timer.count_tokens(300);
        timer.count_tokens(212);
        timer.step(4);
    }
    let report = timer.report().unwrap();
    assert_eq!(report.steps, 4);
    assert!((report.samples_per_second - 800.0).abs() < 1e-6);
    assert!((report.tokens_per_second.unwrap() - 102_400.0).abs() < 1e-6);
    // 2 GFLOP in 5 ms are 0.4 TFLOP/s.
    assert!((report.mfu.unwrap() - 0.4).abs() < 1e-9);
    let text = report.to_string();
    for part in
        ["data wait", "optimizer", "4 steps, median 5.000 ms", "800.0 samples/s", "102400 tokens/s", "MFU 40.0%"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    let json = serde_json::to_string(&report).unwrap();
    assert!(json.contains(r#""phase":"data_wait""#), "{json}");
    assert_eq!(serde_json::from_str::<StepReport>(&json).unwrap(), report);
    assert_eq!(clock.timer().build().unwrap().report(), None);
}

#[test]
fn a_validation_is_skipped() {
    let clock = Clock::new();
    let timer = clock.timer().build().unwrap();
    for _ in 0..2 {
        {
            let _phase = timer.phase(Phase::Forward);
            clock.pass(4);
        }
        timer.step(1);
        clock.pass(1000);
        timer.count_tokens(5);
        timer.skip();
        clock.pass(1000);
    }
    let report = timer.report().unwrap();
    assert_eq!(medians(&report), [0.0, 0.0, 4.0, 0.0, 0.0, 0.0, 0.0]);
    assert!((report.total_seconds - 0.008).abs() < 1e-9);
    assert_eq!(report.tokens_per_second, None);
}

#[test]
fn guards_may_be_dropped_in_any_order_and_after_a_step() {
    let clock = Clock::new();
    let timer = clock.timer().build().unwrap();
    let forward = timer.phase(Phase::Forward);
    clock.pass(1);
    let backward = timer.phase(Phase::Backward);
    clock.pass(2);
    drop(forward);
    clock.pass(4);
    timer.step(1);
    clock.pass(8);
    drop(backward);
    clock.pass(16);
    timer.step(1);
    let report = timer.report().unwrap();
    let total = |phase| (1e3 * report.phase(phase).unwrap().total_seconds).round();
    assert_eq!([Phase::Forward, Phase::Backward, Phase::Other].map(total), [1.0, 14.0, 16.0]);
}

#[test]
fn leaked_guards_do_not_accumulate() {
    let clock = Clock::new();
    let timer = clock.timer().build().unwrap();
    for _ in 0..10_000 {
        std::mem::forget(timer.phase(Phase::Forward));
    }
    clock.pass(5);
    {
        // Too deep to count as another phase.
        let _backward = timer.phase(Phase::Backward);
        clock.pass(1);
    }
    timer.step(1);
    assert_eq!(medians(&timer.report().unwrap()), [0.0, 0.0, 6.0, 0.0, 0.0, 0.0, 0.0]);
}

#[test]
fn time_that_runs_backwards_counts_as_0_and_is_counted() {
    let clock = Clock::new();
    let timer = clock.timer().build().unwrap();
    {
        let _phase = timer.phase(Phase::Forward);
        clock.pass(10);
    }
    {
        let _phase = timer.phase(Phase::Backward);
        clock.set_back(900);
    }
    {
        let _phase = timer.phase(Phase::Optimizer);
        clock.pass(3);
    }
    timer.step(1);
    let report = timer.report().unwrap();
    assert_eq!(medians(&report), [0.0, 0.0, 10.0, 0.0, 3.0, 0.0, 0.0]);
    assert_eq!(report.clock_jumps, 1);
    // A clock that stands still gives no rates, rather than infinite ones.
    let timer = clock.timer().flops_per_step(1.0).peak_flops_per_second(1.0).build().unwrap();
    drop(timer.phase(Phase::Forward));
    timer.step(1);
    let report = timer.report().unwrap();
    assert_eq!((report.samples_per_second, report.mfu), (0.0, Some(0.0)));
    assert!(report.phases.iter().all(|phase| phase.share == 0.0));
}

#[test]
fn the_timer_works_after_a_panic_in_a_phase() {
    let clock = Clock::new();
    let timer = clock.timer().build().unwrap();
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        for _batch in timer.batches(std::iter::once_with(|| panic!("planted in the loader"))) {}
    }));
    assert!(panicked.is_err());
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let _forward = timer.phase(Phase::Forward);
        let _communication = timer.phase(Phase::Communication);
        clock.pass(3);
        panic!("planted");
    }));
    assert!(panicked.is_err());
    clock.pass(2);
    timer.step(1);
    assert_eq!(medians(&timer.report().unwrap()), [0.0, 0.0, 0.0, 0.0, 0.0, 3.0, 2.0]);
}

#[test]
fn invalid_settings_are_refused() {
    let refused = |builder: StepTimerBuilder, name: &str| match builder.build() {
        Err(ProfileError::Setting { name: found, .. }) => assert_eq!(found, name),
        other => panic!("{name}: {other:?}"),
    };
    refused(StepTimer::builder().window(0), "window");
    refused(StepTimer::builder().window(usize::MAX), "window");
    for flops in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        refused(StepTimer::builder().flops_per_step(flops), "flops_per_step");
        refused(StepTimer::builder().peak_flops_per_second(flops), "peak_flops_per_second");
    }
    if !tch::Cuda::is_available() {
        let error = StepTimer::builder().device(Device::Cuda(0)).build().expect_err("no GPU");
        assert!(error.to_string().contains("no CUDA device"), "{error}");
    }
}

#[test]
fn phases_are_scopes_of_the_profiler() {
    let _alone = alone();
    let timer = StepTimer::builder().build().unwrap();
    let profile = profile_of(Profiler::builder(), || {
        let _forward = timer.phase(Phase::Forward);
        let _copy = timer.phase(Phase::HostToDevice);
    });
    let averages = profile.key_averages(false).unwrap();
    for name in ["forward", "host to device"] {
        assert_eq!(averages.get(name).map(|group| group.count), Some(1), "{name}");
    }
}
