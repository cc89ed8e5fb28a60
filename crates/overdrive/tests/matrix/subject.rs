//! The training as a user's program writes it with these crates.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;

use anyhow::{Context, Result, ensure};
use overdrive::checkpoint::Writers;
use overdrive::core::{AveragedBy, SyncError};
use overdrive::prelude::*;
use tch::nn;

use crate::CPU;
use crate::choices::{Accum, Average, Cell, Clip, Opt, Params, Ranks, Resume, Scaling};
use crate::data::{self, Batch, EPOCHS, Loader, NAMES, STEPS, Trained};
use crate::formulas;
use crate::optimizers::Subject;
use crate::places::{Planted, UNFROZEN_AT, resumed_at};
use crate::reference::{EMA_DECAY, GROWTH_INTERVAL, INIT_SCALE, MAX_NORM, MAX_VALUE, plan};

/// The present `GradientSync`, replaceable because the model may be wrapped again while an accumulator holds this.
#[derive(Clone)]
struct Sync(Rc<RefCell<Box<dyn GradientSync>>>);

impl GradientSync for Sync {
    fn world_size(&self) -> usize {
        self.0.borrow().world_size()
    }

    fn averaged_by(&self) -> AveragedBy {
        self.0.borrow().averaged_by()
    }

    fn averages(&self, parameter: &Tensor) -> bool {
        self.0.borrow().averages(parameter)
    }

    fn hold_back(&self, hold: bool) -> Result<(), SyncError> {
        self.0.borrow().hold_back(hold)
    }

    fn backward(&self, loss: &Tensor) -> Result<(), SyncError> {
        self.0.borrow().backward(loss)
    }

    fn close_with_nothing(&self) -> Result<(), SyncError> {
        self.0.borrow().close_with_nothing()
    }

    fn sum(&self, value: f64) -> Result<f64, SyncError> {
        self.0.borrow().sum(value)
    }
}

struct Run<'a> {
    cell: &'a Cell,
    rank: usize,
    group: Option<&'a ProcessGroup>,
    planted: &'a Planted,
    vs: nn::VarStore,
    /// All parameters, in the order of `NAMES`.
    params: Vec<Tensor>,
    opt: Subject,
    scaler: Option<GradScaler>,
    accum: Option<Accumulator<Sync>>,
    sync: Sync,
    ddp: Option<Rc<DistributedDataParallel>>,
    sched: Option<LrScheduler>,
    average: Option<AveragedModel>,
    loader: Loader,
}

pub fn run(cell: &Cell, rank: usize, group: Option<&ProcessGroup>, folder: &Path) -> Result<Trained> {
    let planted = Planted::of(cell, &data::all_windows(cell)?)?;
    if cell.resume == Resume::Off {
        return Run::new(cell, rank, group, &planted, false)?.train(folder, None);
    }
    let unbroken = Cell { resume: Resume::Off, ..*cell };
    let unbroken = Run::new(&unbroken, rank, group, &planted, false)?.train(folder, None)?;
    Run::new(cell, rank, group, &planted, false)?.train(folder, Some(resumed_at(cell)))?;
    let resumed = Run::new(cell, rank, group, &planted, true)?.train(folder, None)?;
    ensure!(resumed.equals(&unbroken), "the resumed run differs from the uninterrupted one: {resumed:?}, {unbroken:?}");
    Ok(resumed)
}

impl<'a> Run<'a> {
    /// `is_second`: the resuming run, with other initial weights, and the bias unfrozen if it was when the run was
    /// saved.
    fn new(
        cell: &'a Cell,
        rank: usize,
        group: Option<&'a ProcessGroup>,
        planted: &'a Planted,
        is_second: bool,
    ) -> Result<Self> {
        let mut vs = nn::VarStore::new(CPU);
        for name in NAMES {
            let (module, leaf) = name.split_once('.').context("a module and a leaf")?;
            let _ = (vs.root() / module).var(leaf, &data::initial(name).size(), nn::Init::Const(0.0));
        }
        vs.set_kind(if cell.optimizer == Opt::Masters { Kind::BFloat16 } else { Kind::Double });
        let variables = vs.variables();
        let params: Vec<Tensor> = NAMES.iter().map(|name| variables[*name].shallow_clone()).collect();
        tch::no_grad(|| {
            for (name, param) in NAMES.iter().zip(&params) {
                param.shallow_clone().copy_(&(data::initial(name) + if is_second { 1.0 } else { 0.0 }));
            }
        });
        if cell.parameters == Params::Unfrozen {
            let _ = params[3].set_requires_grad(false);
        }
        let mut opt = Subject::new(cell, &vs, group)?;
        let sched = match plan(cell) {
            None => None,
            // tch's optimizer does not report its rate.
            Some(plan) if cell.optimizer == Opt::Tch => {
                Some(LrScheduler::with_base_lrs(opt.get_mut(), plan, &[formulas::SGD_LR])?)
            }
            Some(plan) => Some(LrScheduler::new(opt.get_mut(), plan)?),
        };
        let scaler = GradScaler::builder(CPU).init_scale(INIT_SCALE).growth_interval(GROWTH_INTERVAL);
        let scaler = match cell.scaler {
            Scaling::Off => None,
            Scaling::On => Some(scaler.build()?),
        };
        let ema = Averaging::Ema { decay: EMA_DECAY };
        let average = match cell.average {
            Average::Off => None,
            Average::Ema => Some(AveragedModel::new(&vs, ema)?),
        };
        let sync = Sync(Rc::new(RefCell::new(Box::new(overdrive::core::SingleProcess))));
        let accum = match cell.accumulator {
            Accum::Off => None,
            _ => Some(Accumulator::new(STEPS)?.with_sync(sync.clone())),
        };
        let loader = data::loader(cell, rank, false)?;
        let mut run = Self {
            cell,
            rank,
            group,
            planted,
            vs,
            params,
            opt,
            scaler,
            accum,
            sync,
            ddp: None,
            sched,
            average,
            loader,
        };
        if is_second && cell.parameters == Params::Unfrozen {
            run.unfreeze()?;
        }
        Ok(run)
    }

    fn unfreeze(&mut self) -> Result<()> {
        let _ = self.params[3].set_requires_grad(true);
        self.opt.add(NAMES[3], self.params[3].shallow_clone())?;
        if let Some(sched) = &mut self.sched {
            sched.apply(self.opt.get_mut())?;
        }
        Ok(())
    }

    /// Wraps the model with its present trainable parameters, after dropping the previous wrapping.
    fn wrap(&mut self) -> Result<()> {
        *self.sync.0.borrow_mut() = Box::new(overdrive::core::SingleProcess);
        self.ddp = None;
        let Some(group) = self.group else { return Ok(()) };
        let averages_itself = self.cell.optimizer == Opt::OneBit && self.cell.ranks != Ranks::Views;
        if averages_itself {
            *self.sync.0.borrow_mut() = Box::new(group.clone());
            return Ok(());
        }
        let views = self.cell.ranks == Ranks::Views;
        let ddp = DistributedDataParallel::builder(group).gradient_as_bucket_view(views).build(&self.vs)?;
        let ddp = Rc::new(ddp);
        *self.sync.0.borrow_mut() = Box::new(ddp.clone());
        self.ddp = Some(ddp);
        // The barrier avoids a deadlock between ranks that are threads: one still wrapping would wait for the other's
        // backward pass, which waits for the first.
        Ok(group.barrier()?)
    }

    fn parts(&mut self) -> Vec<(&'static str, &mut dyn Stateful)> {
        let mut parts: Vec<(&'static str, &mut dyn Stateful)> =
            vec![("model", &mut self.vs), ("optimizer", &mut self.opt), ("loader", &mut self.loader)];
        parts.extend(self.scaler.as_mut().map(|it| ("scaler", it as &mut dyn Stateful)));
        parts.extend(self.accum.as_mut().map(|it| ("accumulator", it as &mut dyn Stateful)));
        parts.extend(self.sched.as_mut().map(|it| ("schedule", it as &mut dyn Stateful)));
        parts.extend(self.average.as_mut().map(|it| ("average", it as &mut dyn Stateful)));
        parts
    }

    fn checkpoint(&self, folder: &Path) -> Result<Option<Checkpoint>> {
        // 1-bit Adam's compression errors differ by rank.
        let own = self.cell.saves_each_its_own() || self.cell.optimizer == Opt::OneBit;
        let builder = Checkpoint::builder(folder).background(self.cell.saves_each_its_own());
        Ok(match (self.cell.resume, self.group) {
            (Resume::Off, _) => None,
            (_, None) => Some(builder.build()?),
            (_, Some(group)) => {
                Some(builder.ranks(group.clone(), if own { Writers::Each } else { Writers::First }).build()?)
            }
        })
    }

    /// Resumes from a checkpoint if there is one, and stops after window `until`.
    fn train(&mut self, folder: &Path, until: Option<usize>) -> Result<Trained> {
        let mut checkpoint = self.checkpoint(folder)?;
        let wraps_first = self.cell.saves_each_its_own();
        if wraps_first {
            self.wrap()?;
        }
        let resumed = match &mut checkpoint {
            Some(checkpoint) => checkpoint.resume(&mut self.parts())?,
            None => None,
        };
        if !wraps_first {
            self.wrap()?;
        }
        let mut window = resumed.map_or(0, |resumed| resumed.step as usize);
        let mut open: Vec<Batch> = Vec::new();
        'run: while self.loader.next_epoch() < EPOCHS {
            let steps = if self.accum.is_some() { STEPS } else { 1 };
            let windows = Accumulator::new(steps)?.windows(&self.loader);
            for micro in windows {
                open.push(micro.batch?);
                let total = self.backward(&open, window, 1, micro.closes)?;
                if !micro.closes {
                    continue;
                }
                self.close(&std::mem::take(&mut open), window, total)?;
                window += 1;
                if self.cell.parameters == Params::Unfrozen && window == UNFROZEN_AT {
                    self.unfreeze()?;
                    self.wrap()?;
                }
                if until == Some(window) {
                    let parts = self.parts();
                    let parts: Vec<_> = parts.iter().map(|(name, part)| (*name, &**part)).collect();
                    if let Some(checkpoint) = &mut checkpoint {
                        checkpoint.save(window as u64, &parts)?;
                    }
                    break 'run;
                }
            }
        }
        checkpoint.map_or(Ok(()), Checkpoint::finish)?;
        self.trained(window)
    }

    /// Runs backward on the last of the open window's batches; returns the window's count when it closes.
    fn backward(&mut self, open: &[Batch], window: usize, pass: usize, closes: bool) -> Result<Option<f64>> {
        let batch = open.last().context("a batch")?;
        let (inputs, targets, weights) = data::tensors(self.cell, batch);
        let count = data::count(self.cell, batch);
        let forward = || formulas::model(&self.params, &inputs);
        let ddp = self.ddp.clone();
        let outputs = match &ddp {
            Some(ddp) => ddp.forward(forward)?,
            None => forward(),
        };
        let mut loss = data::summed_loss(&outputs, &targets, &weights) / count as f64;
        if self.planted.is_at(window, open.len() - 1, self.rank, pass) {
            loss *= f64::INFINITY;
        }
        if let Some(scaler) = &mut self.scaler {
            loss = scaler.scale(&loss)?;
        }
        let Some(accum) = &mut self.accum else {
            match &ddp {
                Some(ddp) => ddp.backward(&loss)?,
                None => loss.f_backward()?,
            }
            return Ok(Some(count as f64));
        };
        let count = match self.cell.accumulator {
            Accum::Tokens => Tokens(count),
            _ => Samples(count),
        };
        Ok(accum.backward(self.opt.get(), &loss, count, closes)?)
    }

    /// Everything after a window's last backward pass.
    fn close(&mut self, window: &[Batch], number: usize, total: Option<f64>) -> Result<()> {
        if total == Some(0.0) {
            return Ok(self.opt.get_mut().zero_grad()?);
        }
        if self.cell.optimizer.is_sam() {
            self.unscale_and_clip()?;
            self.opt.ascend()?;
            for micro in 1..=window.len() {
                self.backward(&window[..micro], number, 2, micro == window.len())?;
            }
        }
        self.unscale_and_clip()?;
        match &mut self.scaler {
            Some(scaler) => {
                scaler.step(self.opt.get_mut())?;
                scaler.update()?;
            }
            None => self.opt.get_mut().step()?,
        }
        self.opt.get_mut().zero_grad()?;
        if let Some(sched) = &mut self.sched {
            sched.step(self.opt.get_mut())?;
        }
        if let Some(average) = &mut self.average {
            average.update()?;
        }
        Ok(())
    }

    fn unscale_and_clip(&mut self) -> Result<()> {
        if self.cell.clipping == Clip::Off {
            return Ok(());
        }
        if let Some(scaler) = &mut self.scaler {
            scaler.unscale_(self.opt.get_mut())?;
        }
        let params = self.opt.get().parameters();
        match self.cell.clipping {
            Clip::Norm => drop(clip_grad_norm_(params, MAX_NORM)?),
            _ => clip_grad_value_(params, MAX_VALUE)?,
        }
        Ok(())
    }

    fn trained(&self, windows: usize) -> Result<Trained> {
        let named = |(name, tensor): (&&str, &Tensor)| ((*name).to_owned(), tensor.detach_copy());
        let mut averages = Vec::new();
        for average in self.average.iter().map(AveragedModel::averages) {
            let of = average?.into_iter().map(|it| (it.name().unwrap_or_default().to_owned(), it.tensor().copy()));
            averages.extend(of);
        }
        let opt = self.opt.get();
        Ok(Trained {
            weights: NAMES.iter().zip(&self.params).map(named).collect(),
            averages,
            rates: (0..opt.num_groups()).filter_map(|group| opt.lr(group)).collect(),
            scale: self.scaler.as_ref().map_or(Ok(1.0), GradScaler::scale_value)?,
            windows,
            skipped: 0,
        })
    }
}
