//! The same training, written out: one process with all ranks' samples, large batches, formulas.

use anyhow::{Context, Result};
use overdrive::prelude::*;
use overdrive::sched::{Plan, Scheduler};

use crate::choices::{Accum, Average, Cell, Clip, Opt, Params, Ranks, Scaling, Sched};
use crate::data::{self, NAMES, Trained, Windows};
use crate::formulas::{self, Formula};
use crate::places::{Planted, UNFROZEN_AT};

pub const EMA_DECAY: f64 = 0.8;
pub const MAX_NORM: f64 = 0.3;
pub const MAX_VALUE: f64 = 0.1;
pub const RHO: f64 = 0.05;
pub const INIT_SCALE: f64 = 1024.0;
pub const GROWTH_INTERVAL: i64 = 3;

pub fn plan(cell: &Cell) -> Option<Plan> {
    match cell.schedule {
        Sched::Off => None,
        Sched::WarmUp => {
            Some(SequentialLr::new(LinearLr::new().start_factor(0.25).total_iters(4)).then(4, StepLr::new(3)).into())
        }
        Sched::OneCycle => Some(OneCycleLr::new(0.1, 40).into()),
    }
}

struct Reference<'a> {
    cell: &'a Cell,
    ranks: Vec<Windows>,
    planted: Planted,
    /// All parameters, in the order of `NAMES`.
    params: Vec<Tensor>,
    /// How many of the parameters are trained.
    trained: usize,
    formula: Formula,
}

pub fn run(cell: &Cell) -> Result<Trained> {
    let ranks = data::all_windows(cell)?;
    let planted = Planted::of(cell, &ranks)?;
    let params: Vec<_> = NAMES.iter().map(|name| data::initial(name).set_requires_grad(true)).collect();
    let trained = if cell.parameters == Params::Unfrozen { 3 } else { 4 };
    let formula = Formula::of(cell, &params[..trained])?;
    let mut reference = Reference { cell, ranks, planted, params, trained, formula };
    reference.train()
}

impl Reference<'_> {
    fn train(&mut self) -> Result<Trained> {
        let windows = self.ranks[0].windows.len();
        let base_rates = self.formula.rates();
        let mut schedule = plan(self.cell).map(|plan| Scheduler::new(&base_rates, plan)).transpose()?;
        let (mut scale, mut good_steps, mut skipped) = (INIT_SCALE, 0, 0);
        let mut averages: Vec<Tensor> = Vec::new();
        for window in 0..windows {
            if let Some(schedule) = &schedule {
                self.formula.set_rates(schedule)?;
            }
            if self.total(window) > 0 {
                let gradients = self.gradients(window)?;
                let is_finite = gradients.iter().all(|it| bool::try_from(it.isfinite().all()).unwrap_or_default());
                match self.cell.scaler {
                    Scaling::On if !is_finite => (scale, good_steps, skipped) = (scale * 0.5, 0, skipped + 1),
                    _ => {
                        self.formula.step(&self.params[..self.trained], &gradients)?;
                        good_steps += 1;
                        if good_steps == GROWTH_INTERVAL {
                            (scale, good_steps) = (scale * 2.0, 0);
                        }
                    }
                }
                if let Some(schedule) = &mut schedule {
                    schedule.step()?;
                }
                if self.cell.average == Average::Ema {
                    averages = match averages.is_empty() {
                        true => self.params.iter().map(Tensor::detach_copy).collect(),
                        false => {
                            let both = averages.iter().zip(&self.params);
                            both.map(|(old, now)| old * EMA_DECAY + now.detach() * (1.0 - EMA_DECAY)).collect()
                        }
                    };
                }
            }
            if self.cell.parameters == Params::Unfrozen && window + 1 == UNFROZEN_AT {
                self.trained = 4;
                self.formula.add(&self.params[3])?;
                if let Some(before) = &mut schedule {
                    // As if the group had been there from the start.
                    let steps = before.last_epoch();
                    *before = Scheduler::new(&[base_rates[0]; 2], plan(self.cell).context("a schedule")?)?;
                    (0..steps).try_for_each(|_| before.step().map(drop))?;
                }
            }
        }
        if let Some(schedule) = &schedule {
            self.formula.set_rates(schedule)?;
        }
        let named = |tensors: &[Tensor]| {
            NAMES.iter().zip(tensors).map(|(name, it)| ((*name).to_owned(), it.detach_copy())).collect()
        };
        Ok(Trained {
            weights: named(&self.params),
            averages: named(&averages),
            rates: if self.cell.optimizer == Opt::Tch { Vec::new() } else { self.formula.rates() },
            scale: if self.cell.scaler == Scaling::On { scale } else { 1.0 },
            windows,
            skipped,
        })
    }

    fn total(&self, window: usize) -> i64 {
        let of_rank = |rank: &Windows| rank.windows[window].iter().map(|it| data::count(self.cell, it)).sum::<i64>();
        self.ranks.iter().map(of_rank).sum()
    }

    /// The gradients for the optimizer's step; with SAM, those after its ascent.
    fn gradients(&mut self, window: usize) -> Result<Vec<Tensor>> {
        let first = self.gradients_here(window, 1)?;
        if !self.cell.optimizer.is_sam() {
            return Ok(first);
        }
        let before: Vec<Tensor> = self.params.iter().map(Tensor::detach_copy).collect();
        let ascent = RHO / (formulas::norm(&first) + 1e-12);
        tch::no_grad(|| {
            for (param, gradient) in self.params.iter_mut().zip(&first) {
                *param += gradient * ascent;
            }
        });
        let second = self.gradients_here(window, 2);
        tch::no_grad(|| self.params.iter_mut().zip(&before).for_each(|(param, before)| param.copy_(before)));
        second
    }

    /// The clipped gradients of the large batch over all ranks, at the present parameters.
    fn gradients_here(&self, window: usize, pass: usize) -> Result<Vec<Tensor>> {
        let total = self.total(window) as f64;
        let ranks = self.ranks.len();
        let mut of_ranks = Vec::new();
        for (rank, windows) in self.ranks.iter().enumerate() {
            let batches = &windows.windows[window];
            let (inputs, targets, weights) = data::tensors(self.cell, &batches.concat());
            let outputs = formulas::model(&self.params, &inputs);
            let sum = data::summed_loss(&outputs, &targets, &weights);
            // With accumulation, all ranks form one large batch; without, the ranks' mean losses are averaged.
            let mut loss = match self.cell.accumulator {
                Accum::Off => sum / batches.concat().len() as f64,
                _ => sum * (ranks as f64 / total),
            };
            if (0..batches.len()).any(|micro| self.planted.is_at(window, micro, rank, pass)) {
                loss *= f64::INFINITY;
            }
            of_ranks.push(Tensor::run_backward(&[loss], &self.params[..self.trained], false, false));
        }
        // 1-bit Adam averages in its step, so each rank clips its own gradients before that.
        let clips_apart = self.cell.optimizer == Opt::OneBit && self.cell.ranks == Ranks::Ddp;
        if clips_apart {
            of_ranks.iter_mut().for_each(|gradients| self.clip(gradients));
        }
        let mean = |index: usize| of_ranks.iter().map(|it| &it[index] / ranks as f64).reduce(|one, other| one + other);
        let mut gradients: Vec<Tensor> = (0..self.trained).filter_map(mean).collect();
        if !clips_apart {
            self.clip(&mut gradients);
        }
        Ok(gradients)
    }

    fn clip(&self, gradients: &mut [Tensor]) {
        match self.cell.clipping {
            Clip::Off => {}
            Clip::Norm => {
                let factor = MAX_NORM / (formulas::norm(gradients) + 1e-6);
                if factor < 1.0 || factor.is_nan() {
                    gradients.iter_mut().for_each(|it| *it = &*it * factor);
                }
            }
            Clip::Value => gradients.iter_mut().for_each(|it| *it = it.clamp(-MAX_VALUE, MAX_VALUE)),
        }
    }
}
