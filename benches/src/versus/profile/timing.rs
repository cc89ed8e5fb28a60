//! The overhead of what may always stay on: the step timer, the monitor, and scopes while no profiler is on.

use std::cell::RefCell;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use overdrive::prelude::*;
use overdrive_bench_report::{Ratio, Target};
use overdrive_profile::{Monitor, Phase, Sample, StepTimer, record_function};
use tch::nn::VarStore;

use crate::model::{Mlp, cross_entropy};
use crate::versus::turns::{Case, Findings, Turns};

const PAIRS: u32 = 31;
/// Pairs of short samples. There are many, because an overhead of 1% is looked for, and the speed of a shared machine
/// changes by 10% from one tenth of a second to the next.
const SHORT_PAIRS: u32 = 201;
/// Steps of a short sample, which takes about a tenth of a second.
const STEPS: u32 = 10;
/// Steps of a sample with the monitor, which samples the machine several times in it.
const WATCHED_STEPS: u32 = 50;
const SCOPES: u32 = 1_000_000;
const EMPTY_STEPS: u32 = 20_000;
const PLAIN: &str = "the same without";
const LIMIT: &str = "a limit of 20 ns";
const SHARE_OF_STEP: &str = "a limit of 50 us, 1% of 5 ms";
const SHARE_OF_CORE: &str = "a limit of 10 ms, 1%";

pub fn compare(pairs: Option<u32>, findings: &mut Findings) -> Result<()> {
    let training = RefCell::new(Training::new()?);
    let timer = StepTimer::builder().build()?;
    let mut turns = Turns::default();
    turns.ours(PLAIN, || training.borrow_mut().steps(STEPS, None));
    turns.ours("timer", || training.borrow_mut().steps(STEPS, Some(&timer)));
    turns.take("profile, step timer", pairs.unwrap_or(SHORT_PAIRS))?;
    let mut row = |turns: &Turns<'_>, what: &str, name: &str| {
        let text = format!("training step of MLP 784-1024-1024-10, batch 32, with {what}");
        let case = Case { text: &text, unit: "ms", ratio: Ratio::ShareOfCost };
        turns.compare(findings, case, (name, PLAIN), Some(Target::AtMost(1.01)))
    };
    row(&turns, "a StepTimer", "timer")?;

    let pairs = pairs.unwrap_or(PAIRS);
    let mut turns = Turns::default();
    turns.ours(PLAIN, || training.borrow_mut().steps(WATCHED_STEPS, None));
    turns.ours("both", || {
        // Ten times as often as by default.
        let _monitor = Monitor::builder().interval(Duration::from_millis(100)).threads(true).start()?;
        training.borrow_mut().steps(WATCHED_STEPS, Some(&timer))
    });
    turns.take("profile, step timer and monitor", pairs)?;
    row(&turns, "a StepTimer, and a Monitor that looks 10 times a second", "both")?;

    let mut turns = Turns::default();
    turns.ours("phases", || {
        let started = Instant::now();
        for _ in 0..EMPTY_STEPS {
            for phase in Phase::ALL {
                drop(timer.phase(black_box(phase)));
            }
            timer.step(32);
        }
        Ok(started.elapsed().as_secs_f64() * 1e6 / f64::from(EMPTY_STEPS))
    });
    turns.ours(SHARE_OF_STEP, || Ok(50.0));
    turns.ours("monitor", || {
        let mut monitor = Monitor::builder().interval(Duration::from_millis(100)).threads(true).start()?;
        std::thread::sleep(Duration::from_millis(1050));
        monitor.stop();
        busy_milliseconds(&monitor.samples())
    });
    turns.ours(SHARE_OF_CORE, || Ok(10.0));
    turns.take("profile, their own time", pairs.min(15))?;
    let mut row = |what: &str, unit, pair| {
        let case = Case { text: what, unit, ratio: Ratio::ShareOfCost };
        turns.compare(findings, case, pair, Some(Target::AtMost(1.0)))
    };
    row("a StepTimer's seven phases and a step", "us", ("phases", SHARE_OF_STEP))?;
    row("a Monitor that looks 10 times a second, CPU time in a second", "ms", ("monitor", SHARE_OF_CORE))?;

    let mut turns = Turns::default();
    turns.ours("scope", || {
        let started = Instant::now();
        for _ in 0..SCOPES {
            drop(record_function(black_box("scope")));
        }
        Ok(started.elapsed().as_secs_f64() * 1e9 / f64::from(SCOPES))
    });
    turns.ours(LIMIT, || Ok(20.0));
    turns.take("profile, scopes", pairs)?;
    let case = Case { text: "a scope while no profiler is on", unit: "ns", ratio: Ratio::ShareOfCost };
    turns.compare(findings, case, ("scope", LIMIT), Some(Target::AtMost(1.0)))
}

/// CPU time of the monitor's own thread, in milliseconds per second.
fn busy_milliseconds(samples: &[Arc<Sample>]) -> Result<f64> {
    let own = samples.iter().filter_map(|sample| {
        let thread = sample.threads.iter().find(|thread| thread.name == "monitor")?;
        Some((sample.elapsed_seconds, thread.cpu_seconds))
    });
    let own: Vec<_> = own.collect();
    let (first, last) = own.first().zip(own.last()).context("no sample has the monitor's thread")?;
    Ok((last.1 - first.1) / (last.0 - first.0) * 1e3)
}

/// An MLP whose step takes 5 to 10 ms on one thread.
struct Training {
    model: Mlp,
    opt: AdamW,
    inputs: Tensor,
    targets: Tensor,
}

impl Training {
    fn new() -> Result<Self> {
        let vs = VarStore::new(Device::Cpu);
        let model = Mlp::new(&vs.root(), &[784, 1024, 1024, 10]);
        let opt = AdamW::builder(vs.trainable_variables()).lr(1e-3).fused(true).build()?;
        let inputs = Tensor::randn([32, 784], (Kind::Float, Device::Cpu));
        let targets = Tensor::randint(10, [32], (Kind::Int64, Device::Cpu));
        Ok(Self { model, opt, inputs, targets })
    }

    /// Milliseconds per step.
    fn steps(&mut self, count: u32, timer: Option<&StepTimer>) -> Result<f64> {
        let started = Instant::now();
        for _ in 0..count {
            self.step(timer)?;
        }
        Ok(started.elapsed().as_secs_f64() * 1e3 / f64::from(count))
    }

    fn step(&mut self, timer: Option<&StepTimer>) -> Result<()> {
        let enter = |phase| timer.map(|timer| timer.phase(phase));
        drop(enter(Phase::DataWait));
        drop(enter(Phase::HostToDevice));
        let loss = {
            let _phase = enter(Phase::Forward);
            cross_entropy(&self.model.forward(&self.inputs), &self.targets)
        };
        {
            let _phase = enter(Phase::Backward);
            loss.f_backward()?;
        }
        {
            let _phase = enter(Phase::Optimizer);
            self.opt.step()?;
            self.opt.zero_grad()?;
        }
        if let Some(timer) = timer {
            timer.step(32);
        }
        Ok(())
    }
}
