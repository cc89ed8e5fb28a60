//! Records of runs.

use std::time::Duration;

use overdrive_profile::{Phase, Profile, ProfileError, Profiler, RunProfile, RunRecorder, StepTimer};
use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Tensor};

use crate::step_timer::Clock;
use crate::{FLOAT, alone};

/// 40 steps of two layers of 128 by 128, on batches of 64.
fn train(recorder: RunRecorder) -> RunProfile {
    let vs = nn::VarStore::new(Device::Cpu);
    let layer = |name: &str| nn::linear(vs.root() / name, 128, 128, Default::default());
    let layers = nn::seq().add(layer("one")).add_fn(Tensor::relu).add(layer("other"));
    let mut optimizer = nn::Sgd::default().build(&vs, 1e-4).unwrap();
    let inputs = Tensor::randn([64, 128], FLOAT);
    let timer = StepTimer::builder().warmup_steps(3).record(recorder).build().unwrap();
    for _ in 0..40 {
        let loss = {
            let _phase = timer.phase(Phase::Forward);
            layers.forward(&inputs).square().mean(Kind::Float)
        };
        {
            let _phase = timer.phase(Phase::Backward);
            loss.backward();
        }
        {
            let _phase = timer.phase(Phase::Optimizer);
            optimizer.step();
            optimizer.zero_grad();
        }
        timer.step(64);
    }
    timer.finish().unwrap()
}

fn recorder() -> RunRecorder {
    RunRecorder::new().steps_before(10).profiled_steps(4).sample_interval(Duration::from_millis(10))
}

#[test]
fn a_record_holds_steps_operators_and_the_machine() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let run = train(recorder().folder(folder.path()));
    let steps = run.steps.as_ref().unwrap();
    // 40 steps less 3 of the warm-up, 1 that warms the profiler up, 4 profiled ones, and those while the trace is
    // written.
    let slowed = run.step_times.iter().filter(|step| step.is_profiled).count();
    assert_eq!((steps.steps, steps.steps_seen, run.step_times.len()), (37 - slowed as u64, 40, 37));
    assert!(slowed >= 5 && run.step_times[10..15].iter().all(|step| step.is_profiled), "{slowed}");
    assert!(run.step_times.windows(2).all(|pair| pair[0].start_seconds < pair[1].start_seconds));
    let profiled = run.profiled.as_ref().unwrap();
    assert_eq!(profiled.steps, 4);
    let calls = |name: &str, phase: Phase| {
        profiled.ops.iter().filter(|op| op.name == name && op.phase == phase).map(|op| op.calls).sum::<f64>()
    };
    assert_eq!(calls("aten::addmm", Phase::Forward), 2.0);
    // The gradient of each layer's weight, and of its input except for the first layer's.
    assert_eq!(calls("aten::mm", Phase::Backward), 3.0);
    assert_eq!(calls("aten::addmm", Phase::Backward), 0.0);
    let flops: f64 = profiled.ops.iter().filter(|op| op.name == "aten::addmm").map(|op| op.flops).sum();
    assert_eq!(flops, 2.0 * 2.0 * 64.0 * 128.0 * 128.0);
    let whole: f64 = profiled.phases.iter().map(|phase| phase.seconds).sum();
    assert!((whole / profiled.step_seconds - 1.0).abs() < 1e-6, "{whole} {}", profiled.step_seconds);
    assert!(
        profiled.phases.iter().all(|phase| phase.operator_seconds <= phase.seconds + 1e-9),
        "{:?}",
        profiled.phases
    );
    assert!(!profiled.memory.is_empty() && !run.samples.is_empty());
    let names: Vec<_> = run.samples.last().unwrap().threads.iter().map(|thread| thread.name.clone()).collect();
    assert!(names.iter().any(|name| name == "monitor"), "{names:?}");
    assert!(run.samples.last().unwrap().threads.iter().any(|thread| thread.id == run.timer_thread));
    // The file is the same, and the trace is there.
    assert_eq!(RunProfile::read_json(folder.path().join("profile.json")).unwrap(), run);
    assert!(folder.path().join("trace.json.gz").exists());
    assert!(run.notes.is_empty(), "{:?}", run.notes);
}

#[test]
fn short_steps_are_profiled_longer() {
    let clock = Clock::new();
    let profiled = |steps: u64, milliseconds: u64| {
        let recorder = RunRecorder::new().steps_before(1).sample_interval(Duration::from_millis(10));
        let timer = clock.timer().record(recorder).build().unwrap();
        for _ in 0..steps {
            let _phase = timer.phase(Phase::Forward);
            let _ = Tensor::ones([8, 8], FLOAT);
            clock.pass(milliseconds);
            timer.step(1);
        }
        let run = timer.finish().unwrap();
        assert!(run.notes.is_empty(), "{:?}", run.notes);
        (run.profiled.unwrap().steps, run.steps.unwrap().steps)
    };
    // One step before the profiler, one that warms it up, five that take 75 ms; the rest is timed again.
    assert_eq!(profiled(10, 15), (5, 4));
    // Fifty of a millisecond; at most a hundred.
    assert_eq!(profiled(1000, 1), (50, 949));
    assert_eq!(profiled(1000, 0), (100, 899));
}

#[test]
fn the_programs_own_profiler_takes_precedence() {
    let _alone = alone();
    let recorder = || RunRecorder::new().steps_before(2).profiled_steps(3).sample_interval(Duration::from_millis(10));
    let timer = StepTimer::builder().warmup_steps(0).record(recorder()).build().unwrap();
    let mut own = Profiler::builder().build().unwrap();
    for step in 0..40 {
        match step {
            // After the first profiled step of the recording.
            4 => own.start().unwrap(),
            11 => own.stop().unwrap(),
            _ => {}
        }
        let _phase = timer.phase(Phase::Forward);
        let _ = Tensor::ones([8, 8], FLOAT);
        timer.step(1);
    }
    let ones = |profile: &Profile| profile.key_averages(false).unwrap().get("aten::ones").map(|sum| sum.count);
    assert_eq!(ones(own.profile().unwrap()), Some(7));
    let run = timer.finish().unwrap();
    assert!(run.notes.is_empty(), "{:?}", run.notes);
    let profiled = run.profiled.as_ref().unwrap();
    let calls: f64 = profiled.ops.iter().filter(|op| op.name == "aten::ones").map(|op| op.calls).sum();
    assert_eq!((profiled.steps, calls), (3, 1.0));
    // Steps 2 to 4; from 14 on, one that warms the profiler up and three profiled ones.
    let slowed: Vec<_> = run.step_times.iter().filter(|step| step.is_profiled).map(|step| step.step).collect();
    assert_eq!(slowed, [2, 3, 4, 14, 15, 16, 17]);

    own.start().unwrap();
    let timer = StepTimer::builder().warmup_steps(0).record(recorder().steps_before(0)).build().unwrap();
    for _ in 0..40 {
        timer.step(1);
    }
    let run = timer.finish().unwrap();
    // Without phases, the first step has no start, so it does not count.
    assert_eq!((run.profiled, run.steps.unwrap().steps), (None, 39));
    assert!(run.notes.iter().any(|note| note.contains("the program's own `Profiler`")), "{:?}", run.notes);
    own.stop().unwrap();
}

#[test]
fn a_timer_that_is_dropped_early_leaves_its_record() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let timer = StepTimer::builder().warmup_steps(0).record(recorder().folder(folder.path())).build().unwrap();
    // The last one is in the profiler's window.
    for _ in 0..13 {
        let _phase = timer.phase(Phase::Forward);
        let _ = Tensor::randn([8, 8], FLOAT);
        timer.step(1);
    }
    drop(timer);
    let run = RunProfile::read_json(folder.path().join("profile.json")).unwrap();
    assert_eq!(run.steps.unwrap().steps, 10);
    assert_eq!(run.profiled.unwrap().steps, 2);
    assert!(matches!(StepTimer::builder().build().unwrap().finish(), Err(ProfileError::NothingToRecord(_))));
}

#[test]
fn other_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("profile.json");
    let refused = |content: &str| {
        std::fs::write(&path, content).unwrap();
        RunProfile::read_json(&path).unwrap_err().to_string()
    };
    assert!(refused("{}").contains("profile.json"), "{}", refused("{}"));
    let run = RunProfile::merge_ranks(vec![]).unwrap_err().to_string();
    assert!(run.contains("no record"), "{run}");
    assert!(RunProfile::read_json(folder.path().join("none")).unwrap_err().to_string().contains("cannot read it"));
}
