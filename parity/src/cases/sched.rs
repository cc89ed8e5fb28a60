//! Learning rate schedules in 500 configurations each, with a restart from a saved state in the middle.

use anyhow::{Context, Result, ensure};
use overdrive_core::{Optimizer, OptimizerError, OptimizerId, Stateful};
use overdrive_sched::{LrScheduler, ReduceLrOnPlateau, layer_wise_lrs};
use serde::Deserialize;
use tch::Tensor;

use super::sched_config::{Plateau, Spec, WarmRestarts};
use crate::record::{Found, Given};

#[derive(Deserialize)]
struct Config<S> {
    lrs: Vec<f64>,
    steps: u64,
    restart: u64,
    schedule: S,
    #[serde(default)]
    metrics: Vec<Option<f64>>,
    #[serde(default)]
    layer_wise: Option<(f64, f64, usize)>,
}

/// An optimizer that has only learning rates and momenta.
struct Rates {
    id: OptimizerId,
    lrs: Vec<f64>,
    momenta: Vec<f64>,
}

impl Rates {
    fn new(lrs: &[f64]) -> Self {
        Self { id: OptimizerId::new(), lrs: lrs.to_vec(), momenta: vec![0.9; lrs.len()] }
    }
}

impl Optimizer for Rates {
    fn id(&self) -> OptimizerId {
        self.id
    }

    fn params(&self) -> Vec<Tensor> {
        Vec::new()
    }

    fn num_groups(&self) -> usize {
        self.lrs.len()
    }

    fn lr(&self, group: usize) -> Option<f64> {
        self.lrs.get(group).copied()
    }

    fn set_lr(&mut self, group: usize, lr: f64) -> Result<(), OptimizerError> {
        OptimizerError::check_lr(lr)?;
        self.lrs[group] = lr;
        Ok(())
    }

    fn momentum(&self, group: usize) -> Option<f64> {
        self.momenta.get(group).copied()
    }

    fn set_momentum(&mut self, group: usize, momentum: f64) -> Result<(), OptimizerError> {
        self.momenta[group] = momentum;
        Ok(())
    }

    fn step(&mut self) -> Result<(), OptimizerError> {
        Ok(())
    }

    fn zero_grad(&mut self) -> Result<(), OptimizerError> {
        Ok(())
    }
}

/// An optimizer's learning rates and momenta at each step.
#[derive(Default)]
struct History {
    lrs: Vec<f64>,
    momenta: Vec<f64>,
}

impl History {
    fn push(&mut self, opt: &Rates) {
        self.lrs.extend(&opt.lrs);
        self.momenta.extend(&opt.momenta);
    }

    fn insert(&self, found: &mut Found, number: usize, groups: usize, momentum: bool) {
        let table = |values: &[f64]| Tensor::from_slice(values).view([-1, groups as i64]);
        found.insert(format!("{number}.lr"), &table(&self.lrs));
        if momentum {
            found.insert(format!("{number}.momentum"), &table(&self.momenta));
        }
    }
}

pub fn trajectories(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    for (number, config) in given.value::<Vec<Config<Spec>>>("configs")?.iter().enumerate() {
        let history = trajectory(config).with_context(|| format!("configuration {number}"))?;
        history.insert(&mut found, number, config.lrs.len(), config.schedule.moves_momentum());
    }
    Ok(found)
}

fn trajectory(config: &Config<Spec>) -> Result<History> {
    let mut opt = Rates::new(&config.lrs);
    let mut sched = LrScheduler::new(&mut opt, config.schedule.plan()?)?;
    let mut history = History::default();
    for step in 0..=config.steps {
        if step > 0 {
            sched.step(&mut opt)?;
        }
        if step == config.restart {
            let state = sched.state_dict()?;
            // As in a new process: a new optimizer and schedule, whose position comes only from the state.
            opt = Rates::new(&vec![0.5; config.lrs.len()]);
            sched = LrScheduler::new(&mut opt, config.schedule.plan()?)?;
            sched.load_state_dict(&state)?;
            sched.apply(&mut opt)?;
        }
        ensure!(sched.last_lr() == opt.lrs && sched.last_epoch() == step);
        history.push(&opt);
    }
    Ok(history)
}

pub fn plateaus(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    for (number, config) in given.value::<Vec<Config<Plateau>>>("configs")?.iter().enumerate() {
        let mut opt = Rates::new(&config.lrs);
        let attach = |opt: &Rates| -> Result<ReduceLrOnPlateau> { Ok(config.schedule.builder().attach(opt)?) };
        let (mut plateau, mut history) = (attach(&opt)?, History::default());
        for step in 0..=config.steps {
            if let Some(metric) = step.checked_sub(1).and_then(|step| config.metrics.get(step as usize)) {
                plateau.step(metric.unwrap_or(f64::NAN), &mut opt)?;
            }
            if step == config.restart {
                let state = plateau.state_dict()?;
                opt = Rates::new(&vec![0.5; config.lrs.len()]);
                plateau = attach(&opt)?;
                plateau.load_state_dict(&state)?;
                plateau.apply(&mut opt)?;
            }
            history.push(&opt);
        }
        history.insert(&mut found, number, config.lrs.len(), false);
    }
    Ok(found)
}

pub fn layer_wise(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    for (number, mut config) in given.value::<Vec<Config<Spec>>>("configs")?.into_iter().enumerate() {
        let (lr, decay, groups) = config.layer_wise.context("layers")?;
        config.lrs = layer_wise_lrs(lr, decay, groups)?;
        trajectory(&config)?.insert(&mut found, number, groups, false);
    }
    Ok(found)
}

#[derive(Deserialize)]
struct Between {
    lr: f64,
    epochs: Vec<f64>,
    schedule: WarmRestarts,
}

pub fn between_steps(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    let configs = given.value::<Vec<Between>>("configs")?;
    let rates = configs.iter().map(|config| {
        let schedule = config.schedule.schedule();
        let rates: Vec<_> = config.epochs.iter().map(|&epoch| schedule.lr_at(config.lr, epoch)).collect();
        Tensor::from_slice(&rates)
    });
    found.insert("lr", &Tensor::stack(&rates.collect::<Vec<_>>(), 0));
    Ok(found)
}
