//! A warm-up and a cosine, stopped halfway and resumed.
//!
//! Trains a small model for 200 steps in one go; then again in two: after 90 steps the weights and the schedule's state
//! are saved, and a new optimizer and a new schedule continue from them.
//!
//! Expect: a rate that rises for 20 steps and falls for 180; a loss that falls; a state of two numbers; and final
//! weights that are equal bit for bit. Then a run that early stopping ends, with its best weights restored.
//!
//!     cargo run -p overdrive-examples --example 09_schedules
#![forbid(unsafe_code)]

use std::path::Path;

use anyhow::{Context, Result, ensure};
use overdrive::prelude::*;
use overdrive::sched::{Plan, Verdict};

const CPU: Device = Device::Cpu;
const STEPS: u64 = 200;
const WARM_UP: u64 = 20;
const SPLIT: u64 = 90;

/// Everything that a run needs. SGD without momentum has no state to save.
struct Run {
    model: nn::Sequential,
    opt: Sgd,
    sched: LrScheduler,
}

/// A line up to the optimizer's rate, then half a cosine down.
fn schedule() -> Plan {
    let warm_up = LinearLr::new().start_factor(0.05).total_iters(WARM_UP);
    SequentialLr::new(warm_up).then(WARM_UP, CosineAnnealingLr::new(STEPS - WARM_UP)).into()
}

impl Run {
    fn start() -> Result<Self> {
        tch::manual_seed(5);
        let model = sequential![nn::Linear::new(16, 32)?, nn::Tanh, nn::Linear::new(32, 1)?];
        let mut opt = Sgd::builder(&model).lr(0.2).build()?;
        let sched = LrScheduler::new(&mut opt, schedule())?;
        Ok(Self { model, opt, sched })
    }

    /// Trains until the schedule has reached step `end`.
    fn train_to(&mut self, end: u64) -> Result<()> {
        while self.sched.last_epoch() < end {
            let step = self.sched.last_epoch();
            let loss = loss(&self.model, step as i64)?;
            if step.is_multiple_of(30) {
                println!("step {step:>3}: lr {:.4}, loss {:.4}", self.sched.last_lr()[0], loss.double_value(&[]));
            }
            loss.backward();
            self.opt.step()?;
            self.opt.zero_grad()?;
            self.sched.step(&mut self.opt)?;
        }
        Ok(())
    }
}

/// The loss on a batch that depends only on its number. The target is the sine of half the difference between the sums
/// of a row's halves.
fn loss(model: &nn::Sequential, batch: i64) -> Result<Tensor> {
    tch::manual_seed(batch);
    let x = Tensor::randn([64, 16], (Kind::Float, CPU));
    let halves = x.view([64, 2, 8]).sum_dim_intlist(2, false, Kind::Float);
    let target = ((halves.select(1, 0) - halves.select(1, 1)) / 2).sin().unsqueeze(1);
    Ok(model.forward(&x)?.mse_loss(&target, tch::Reduction::Mean))
}

fn main() -> Result<()> {
    println!("in one go:");
    let mut whole = Run::start()?;
    let before = loss(&whole.model, -1)?.double_value(&[]);
    whole.train_to(STEPS)?;
    let after = loss(&whole.model, -1)?.double_value(&[]);
    println!("loss on an unseen batch: {before:.4} -> {after:.4}\n");
    ensure!(after < 0.5 * before && whole.sched.last_lr()[0] == 0.0);

    println!("in two parts:");
    let folder = tempfile::tempdir()?;
    let weights = folder.path().join("weights.safetensors");
    let mut first = Run::start()?;
    first.train_to(SPLIT)?;
    nn::save_safetensors(&weights, &first.model.state_dict()?, &[])?;
    let state = first.sched.state_dict()?;
    println!("saved the weights and {:?}", state.iter().collect::<Vec<_>>());
    let resumed = resume(&weights, &state)?;

    let pairs = whole.model.named_parameters().into_iter().zip(resumed.model.named_parameters());
    let equal = pairs.into_iter().all(|(whole, resumed)| whole.tensor().equal(resumed.tensor()));
    ensure!(equal, "the resumed run has other weights");
    println!("the same weights, bit for bit\n");
    early_stopping()
}

/// As in a new process: everything is rebuilt, then loaded.
fn resume(weights: &Path, state: &StateDict) -> Result<Run> {
    let mut run = Run::start()?;
    run.model.load_state_dict(&nn::load_safetensors(weights)?)?;
    run.sched.load_state_dict(state)?;
    // Loading the state does not set the optimizer's rates: this does.
    run.sched.apply(&mut run.opt)?;
    run.train_to(STEPS)?;
    Ok(run)
}

/// Trains at a rate that is too high in the long run, and keeps the best weights.
fn early_stopping() -> Result<()> {
    let mut run = Run::start()?;
    let mut stopping = EarlyStopping::new(3).min_delta(1e-3);
    for epoch in 0..40 {
        for batch in 0..10 {
            loss(&run.model, batch)?.backward();
            run.opt.set_lr(0, 0.01 * 1.25f64.powi(epoch))?;
            run.opt.step()?;
            run.opt.zero_grad()?;
        }
        let metric = loss(&run.model, -1)?.double_value(&[]);
        if stopping.try_step(metric, || anyhow::Ok(run.model.state_dict()?.copied()?))? == Verdict::Stop {
            println!("stopped after epoch {epoch} at a loss of {metric:.4}; the best was {:.4}", stopping.best());
            break;
        }
    }
    stopping.restore(|best| run.model.load_state_dict(best)).context("no weights were kept")??;
    let restored = loss(&run.model, -1)?.double_value(&[]);
    println!("with the best weights restored: {restored:.4}");
    ensure!(restored == stopping.best());
    Ok(())
}
