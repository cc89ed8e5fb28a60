//! Records of runs, and what they say.

use std::time::Duration;

use overdrive_profile::{
    Bottleneck, Diagnosis, Phase, ProfileError, RunProfile, RunRecorder, StepTimer, record_function,
};
use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Tensor};

use crate::{FLOAT, alone};

/// A training loop with something in it.
struct Plant {
    vs: nn::VarStore,
    layers: nn::Sequential,
    optimizer: nn::Optimizer,
    inputs: Tensor,
}

impl Plant {
    fn new(width: i64, depth: i64) -> Self {
        let vs = nn::VarStore::new(Device::Cpu);
        let layers = (0..depth).fold(nn::seq(), |layers, depth| {
            layers.add(nn::linear(vs.root() / depth, width, width, Default::default())).add_fn(Tensor::relu)
        });
        let optimizer = nn::Sgd::default().build(&vs, 1e-4).unwrap();
        Self { vs, layers, optimizer, inputs: Tensor::randn([64, width], FLOAT) }
    }

    fn forward(&self) -> Tensor {
        self.layers.forward(&self.inputs).square().mean(Kind::Float)
    }

    fn run(mut self, recorder: RunRecorder, forward: impl Fn(&Self) -> Tensor, after: impl Fn(&Self)) -> RunProfile {
        let timer = StepTimer::builder().warmup_steps(3).record(recorder).build().unwrap();
        for _ in 0..40 {
            let loss = {
                let _phase = timer.phase(Phase::Forward);
                forward(&self)
            };
            {
                let _phase = timer.phase(Phase::Backward);
                loss.backward();
            }
            {
                let _phase = timer.phase(Phase::Optimizer);
                self.optimizer.step();
                self.optimizer.zero_grad();
            }
            after(&self);
            timer.step(64);
        }
        timer.finish().unwrap()
    }
}

fn recorder() -> RunRecorder {
    RunRecorder::new().steps_before(10).profiled_steps(4).sample_interval(Duration::from_millis(10))
}

/// For steps of less than a millisecond: a thread that waits for a CPU once must not be most of what is seen.
fn recorder_of_short_steps() -> RunRecorder {
    recorder().profiled_steps(20)
}

#[test]
fn a_record_holds_steps_operators_and_the_machine() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let run = Plant::new(128, 2).run(recorder().folder(folder.path()), Plant::forward, |_| {});
    let steps = run.steps.as_ref().unwrap();
    // 40 steps less 3 of the warm-up, 1 that warms the profiler up, 4 under it.
    assert_eq!((steps.steps, steps.steps_seen, run.step_times.len()), (32, 40, 37));
    assert_eq!(run.step_times.iter().filter(|step| step.is_profiled).count(), 5);
    assert!(run.step_times.windows(2).all(|pair| pair[0].start_seconds < pair[1].start_seconds));
    let profiled = run.profiled.as_ref().unwrap();
    assert_eq!(profiled.steps, 4);
    let calls = |name: &str, phase: Phase| {
        profiled.ops.iter().filter(|op| op.name == name && op.phase == phase).map(|op| op.calls).sum::<f64>()
    };
    assert_eq!(calls("aten::addmm", Phase::Forward), 2.0);
    // Each layer's weight, and its input but for the first's.
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
    let _alone = alone();
    let profiled = |steps: u64, pause: Duration| {
        let recorder = RunRecorder::new().steps_before(1).sample_interval(Duration::from_millis(10));
        let timer = StepTimer::builder().warmup_steps(0).record(recorder).build().unwrap();
        for _ in 0..steps {
            let _phase = timer.phase(Phase::Forward);
            let _ = Tensor::ones([8, 8], FLOAT);
            std::thread::sleep(pause);
            timer.step(1);
        }
        let run = timer.finish().unwrap();
        assert!(run.notes.is_empty(), "{:?}", run.notes);
        (run.profiled.unwrap().steps, run.steps.unwrap().steps)
    };
    // One is before the profiler, one warms it up, five take 75 ms, and what follows is timed again.
    assert_eq!(profiled(10, Duration::from_millis(15)), (5, 4));
    let (steps, timed) = profiled(1000, Duration::ZERO);
    assert!((6..=100).contains(&steps) && timed == 999 - steps, "{steps}, {timed}");
}

#[test]
fn a_timer_that_is_dropped_or_broken_off_leaves_its_record() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let timer = StepTimer::builder().warmup_steps(0).record(recorder().folder(folder.path())).build().unwrap();
    // Within the profiler's window.
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
fn files_of_something_else_are_refused() {
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

#[test]
fn loops_over_numbers_are_named() {
    let _alone = alone();
    let by_hand = |plant: &Plant| {
        let outputs = plant.layers.forward(&plant.inputs);
        let _scope = record_function("loss by hand");
        let row = outputs.get(0);
        let sum: f64 = (0..400).map(|place| row.double_value(&[place % 64])).sum();
        outputs.square().mean(Kind::Float) + sum * 0.0
    };
    let diagnosis = Diagnosis::of(&Plant::new(64, 2).run(recorder_of_short_steps(), by_hand, |_| {}));
    let first = &diagnosis.findings[0];
    assert_eq!((first.bottleneck, first.scope.as_deref()), (Bottleneck::HostLoop, Some("loss by hand")), "{diagnosis}");
}

#[test]
fn numbers_that_are_read_here_and_there_are_no_loop() {
    let _alone = alone();
    let now_and_then = |plant: &Plant| {
        let outputs = plant.layers.forward(&plant.inputs);
        let row = outputs.get(0);
        let sum: f64 = (0..40).map(|at| row.double_value(&[at]) + plant.forward().double_value(&[])).sum();
        outputs.square().mean(Kind::Float) + sum * 0.0
    };
    let run = Plant::new(64, 16).run(recorder(), now_and_then, |_| {});
    assert_eq!(run.profiled.unwrap().read_backs, []);
}

#[test]
fn tiny_operators_are_named() {
    let _alone = alone();
    let row_by_row = |plant: &Plant| {
        let rows: Vec<_> = (0..64).map(|row| plant.layers.forward(&plant.inputs.narrow(0, row, 1))).collect();
        Tensor::cat(&rows, 0).square().mean(Kind::Float)
    };
    let diagnosis = Diagnosis::of(&Plant::new(16, 2).run(recorder_of_short_steps(), row_by_row, |_| {}));
    assert_eq!(diagnosis.findings[0].bottleneck, Bottleneck::KernelLaunches, "{diagnosis}");
}

#[test]
fn the_programs_own_code_is_named() {
    let _alone = alone();
    let log = |_: &Plant| {
        let _scope = record_function("logging");
        std::thread::sleep(Duration::from_millis(5));
    };
    let diagnosis = Diagnosis::of(&Plant::new(128, 2).run(recorder(), Plant::forward, log));
    let first = &diagnosis.findings[0];
    assert_eq!((first.bottleneck, first.scope.as_deref()), (Bottleneck::HostCode, Some("logging")), "{diagnosis}");
}

#[test]
fn optimizers_that_go_tensor_by_tensor_are_named() {
    let _alone = alone();
    let named = |optimizer: fn(&nn::VarStore) -> nn::Optimizer, counterpart: &str| {
        let mut plant = Plant::new(8, 200);
        plant.optimizer = optimizer(&plant.vs);
        let diagnosis = Diagnosis::of(&plant.run(recorder(), Plant::forward, |_| {}));
        let found = diagnosis.findings.iter().find(|finding| finding.bottleneck == Bottleneck::OptimizerLoop);
        assert!(found.is_some_and(|found| found.remedy.contains(counterpart)), "{diagnosis}");
    };
    named(|vs| nn::adam(0.9, 0.999, 0.0).build(vs, 1e-4).unwrap(), "`AdamW::builder");
    named(|vs| nn::RmsProp::default().build(vs, 1e-4).unwrap(), "`RmsProp::builder");
}

#[test]
fn arithmetic_is_no_fault() {
    let _alone = alone();
    let diagnosis = Diagnosis::of(&Plant::new(768, 3).run(recorder(), Plant::forward, |_| {}));
    assert_eq!((diagnosis.bound_by, diagnosis.findings.len()), (Some(Bottleneck::Compute), 0), "{diagnosis}");
}
