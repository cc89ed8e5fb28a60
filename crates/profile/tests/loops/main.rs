//! Diagnoses of real loops: the calls are those that libtorch made, but their times are [fixed](with_fixed_times), so
//! that a busy machine has no effect. The loops run one after another, with nothing else in the process; hence this
//! `main`.
#![forbid(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use overdrive_profile::{Bottleneck, Diagnosis, Phase, RunProfile, RunRecorder, StepTimer, record_function};
use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Tensor};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn main() {
    // On busy cores, small operators take long if their threads wait for each other.
    tch::set_num_threads(1);
    let trial = |(name, test): (&str, fn())| {
        Trial::test(name, move || {
            test();
            Ok::<(), Failed>(())
        })
    };
    let tests: [(&str, fn()); 9] = [
        ("loops_over_numbers_are_named", loops_over_numbers_are_named),
        ("numbers_that_are_read_here_and_there_are_not_a_loop", numbers_that_are_read_here_and_there_are_not_a_loop),
        ("tiny_operators_are_named", tiny_operators_are_named),
        ("the_programs_own_code_is_named", the_programs_own_code_is_named),
        ("a_pause_in_one_step_is_not_the_programs_own_code", a_pause_in_one_step_is_not_the_programs_own_code),
        ("tensors_that_are_kept_are_counted_by_the_step", tensors_that_are_kept_are_counted_by_the_step),
        ("skipped_time_is_in_no_profiled_step", skipped_time_is_in_no_profiled_step),
        ("optimizers_that_update_tensor_by_tensor_are_named", optimizers_that_update_tensor_by_tensor_are_named),
        ("arithmetic_is_not_a_finding", arithmetic_is_not_a_finding),
    ];
    let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
    libtest_mimic::run(&arguments, tests.into_iter().map(trial).collect()).exit();
}

/// A training loop with a planted bottleneck.
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

/// Replaces a run's times: a call of an operator takes 2 us, plus 0.1 us per thousand floating point operations; host
/// code in a scope takes 5 ms if it took 5 ms or more, else no time. Removes the samples of the machine.
fn with_fixed_times(mut run: RunProfile) -> RunProfile {
    const CALL: f64 = 2e-6;
    const FLOP: f64 = 1e-10;
    const OWN_CODE: f64 = 5e-3;
    const SMALL: f64 = 1e-5;
    let profiled = run.profiled.as_mut().unwrap();
    profiled.ops.iter_mut().for_each(|op| op.self_cpu_seconds = CALL * op.calls + FLOP * op.flops);
    profiled.read_backs.iter_mut().for_each(|it| it.seconds = CALL * it.operators);
    // Other pauses are caused by the machine.
    profiled.gaps.retain(|gap| gap.scope.is_some() && gap.seconds >= OWN_CODE);
    for gap in &mut profiled.gaps {
        gap.seconds = OWN_CODE;
        gap.typical_seconds = gap.typical_seconds.map(|typical| typical.min(OWN_CODE));
    }
    for times in &mut profiled.phases {
        let ops = || profiled.ops.iter().filter(|op| op.phase == times.phase);
        let small = || ops().filter(|op| op.self_cpu_seconds <= SMALL * op.calls);
        times.calls = ops().map(|op| op.calls).sum();
        times.operator_seconds = ops().map(|op| op.self_cpu_seconds).sum();
        times.small_calls = small().map(|op| op.calls).sum();
        times.small_call_seconds = small().map(|op| op.self_cpu_seconds).sum();
        times.short_pause_seconds = 0.0;
        let gaps = profiled.gaps.iter().filter(|gap| gap.phase == times.phase);
        times.seconds = times.operator_seconds + gaps.map(|gap| gap.seconds).sum::<f64>();
    }
    profiled.step_seconds = profiled.phases.iter().map(|times| times.seconds).sum();
    profiled.queued_seconds = None;
    let steps = run.steps.as_mut().unwrap();
    steps.total_seconds = profiled.step_seconds * steps.steps as f64;
    for phase in &mut steps.phases {
        phase.share = profiled.phase(phase.phase).unwrap().seconds / profiled.step_seconds;
    }
    run.samples.clear();
    run
}

fn diagnosis(run: RunProfile) -> Diagnosis {
    Diagnosis::of(&with_fixed_times(run))
}

fn loops_over_numbers_are_named() {
    let by_hand = |plant: &Plant| {
        let outputs = plant.layers.forward(&plant.inputs);
        let _scope = record_function("loss by hand");
        let row = outputs.get(0);
        let sum: f64 = (0..400).map(|place| row.double_value(&[place % 64])).sum();
        outputs.square().mean(Kind::Float) + sum * 0.0
    };
    let diagnosis = diagnosis(Plant::new(64, 2).run(recorder(), by_hand, |_| {}));
    let first = &diagnosis.findings[0];
    assert_eq!((first.bottleneck, first.scope.as_deref()), (Bottleneck::HostLoop, Some("loss by hand")), "{diagnosis}");
}

fn numbers_that_are_read_here_and_there_are_not_a_loop() {
    let now_and_then = |plant: &Plant| {
        let outputs = plant.layers.forward(&plant.inputs);
        let row = outputs.get(0);
        let sum: f64 = (0..40).map(|at| row.double_value(&[at]) + plant.forward().double_value(&[])).sum();
        outputs.square().mean(Kind::Float) + sum * 0.0
    };
    let run = Plant::new(64, 16).run(recorder(), now_and_then, |_| {});
    assert_eq!(run.profiled.unwrap().read_backs, []);
}

fn tiny_operators_are_named() {
    let row_by_row = |plant: &Plant| {
        let rows: Vec<_> = (0..64).map(|row| plant.layers.forward(&plant.inputs.narrow(0, row, 1))).collect();
        Tensor::cat(&rows, 0).square().mean(Kind::Float)
    };
    let diagnosis = diagnosis(Plant::new(16, 2).run(recorder(), row_by_row, |_| {}));
    assert_eq!(diagnosis.findings[0].bottleneck, Bottleneck::KernelLaunches, "{diagnosis}");
}

fn the_programs_own_code_is_named() {
    let log = |_: &Plant| {
        let _scope = record_function("logging");
        std::thread::sleep(Duration::from_millis(5));
    };
    let diagnosis = diagnosis(Plant::new(128, 2).run(recorder(), Plant::forward, log));
    let first = &diagnosis.findings[0];
    assert_eq!((first.bottleneck, first.scope.as_deref()), (Bottleneck::HostCode, Some("logging")), "{diagnosis}");
}

fn a_pause_in_one_step_is_not_the_programs_own_code() {
    let steps = Cell::new(0);
    let once = |plant: &Plant| {
        // The second of the four profiled steps.
        if steps.replace(steps.get() + 1) == 15 {
            let _scope = record_function("now and then");
            std::thread::sleep(Duration::from_millis(20));
        }
        plant.forward()
    };
    let run = Plant::new(128, 2).run(recorder(), once, |_| {});
    let gaps = &run.profiled.as_ref().unwrap().gaps;
    let gap = gaps.iter().find(|gap| gap.scope.as_deref() == Some("now and then")).unwrap();
    assert!(gap.seconds >= 0.005 && gap.typical_seconds == Some(0.0), "{gap:?}");
    let diagnosis = diagnosis(run);
    assert!(diagnosis.findings.iter().all(|it| it.bottleneck != Bottleneck::HostCode), "{diagnosis}");
}

fn tensors_that_are_kept_are_counted_by_the_step() {
    let (kept, batch) = (RefCell::new(Vec::new()), RefCell::new(None));
    let keep = |_: &Plant| {
        kept.borrow_mut().push(Tensor::ones([1000], FLOAT));
        // Frees the batch before.
        batch.replace(Some(Tensor::ones([1_000_000], FLOAT)));
    };
    let run = Plant::new(64, 2).run(recorder(), Plant::forward, keep);
    assert_eq!(run.profiled.unwrap().kept_bytes.get("cpu"), Some(&4000.0));
}

fn skipped_time_is_in_no_profiled_step() {
    const PAUSE: Duration = Duration::from_millis(400);
    let start = Instant::now();
    let timer = StepTimer::builder().warmup_steps(0).record(recorder()).build().unwrap();
    for step in 0..30 {
        if step == 13 {
            // A validation, in the middle of the profiled steps.
            (0..50).for_each(|_| drop(Tensor::ones([8, 8], FLOAT)));
            std::thread::sleep(PAUSE);
            timer.skip();
        }
        let _phase = timer.phase(Phase::Forward);
        let _ = Tensor::zeros([8, 8], FLOAT);
        timer.step(1);
    }
    let profiled = timer.finish().unwrap().profiled.unwrap();
    let calls = |name: &str| profiled.ops.iter().filter(|op| op.name == name).map(|op| op.calls).sum::<f64>();
    assert_eq!((profiled.steps, calls("aten::zeros"), calls("aten::ones")), (4, 1.0, 0.0));
    // The pause counts neither in the steps nor in their gaps.
    let rest = (start.elapsed() - PAUSE).as_secs_f64();
    let gaps: f64 = profiled.gaps.iter().map(|gap| gap.seconds).sum();
    assert!(4.0 * profiled.step_seconds <= rest && gaps <= profiled.step_seconds, "{profiled:?}");
    assert!(profiled.scopes.is_empty(), "{:?}", profiled.scopes);
}

fn optimizers_that_update_tensor_by_tensor_are_named() {
    let named = |optimizer: fn(&nn::VarStore) -> nn::Optimizer, counterpart: &str| {
        let mut plant = Plant::new(8, 200);
        plant.optimizer = optimizer(&plant.vs);
        let diagnosis = diagnosis(plant.run(recorder(), Plant::forward, |_| {}));
        let found = diagnosis.findings.iter().find(|finding| finding.bottleneck == Bottleneck::OptimizerLoop);
        assert!(found.is_some_and(|found| found.remedy.contains(counterpart)), "{diagnosis}");
    };
    named(|vs| nn::adam(0.9, 0.999, 0.0).build(vs, 1e-4).unwrap(), "`AdamW::builder");
    named(|vs| nn::RmsProp::default().build(vs, 1e-4).unwrap(), "`RmsProp::builder");
}

fn arithmetic_is_not_a_finding() {
    let diagnosis = diagnosis(Plant::new(768, 3).run(recorder(), Plant::forward, |_| {}));
    assert_eq!((diagnosis.bound_by, diagnosis.findings.len()), (Some(Bottleneck::Compute), 0), "{diagnosis}");
}
