//! Finds a learning rate by a short training at rising rates.

use std::collections::HashSet;

use overdrive_core::{Module, Optimizer, OptimizerError, StateDict, StateError, TorchError};
use tch::Tensor;

use crate::ScheduleError;
use crate::error::Check;
use crate::lr_found::LrSweep;

/// How much of the smoothed loss each step keeps.
const BETA: f64 = 0.98;

/// How the rate rises from step to step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sweep {
    /// By a constant factor.
    #[default]
    Exponential,
    /// By a constant difference.
    Linear,
}

/// Finds a learning rate: trains a few steps at rates that rise from tiny to huge, and watches the loss.
///
/// Afterwards the model, the optimizer's state and its rates are, bit for bit, what they were before, also when a step
/// fails or panics. Gradients are freed. Nothing else that the steps change is restored: the loader's position, random
/// generators, a `GradScaler`.
///
/// With several ranks, the step has to return the mean of all ranks' losses. Each rank decides by the loss when to
/// stop; with different losses, one rank would stop and the others would wait for it.
///
/// ```
/// use overdrive_core::{Module, Optimizer};
/// use overdrive_sched::{LrFinder, ScheduleError};
/// use tch::Tensor;
///
/// fn find(
///     model: &impl Module,
///     opt: &mut impl Optimizer,
///     mut next_loss: impl FnMut() -> Tensor,
/// ) -> Result<Option<f64>, Box<dyn std::error::Error>> {
///     let found = LrFinder::new().max_lr(10.0).run(model, opt, |opt| {
///         let loss = next_loss();
///         loss.backward();
///         opt.step()?;
///         opt.zero_grad()?;
///         Ok::<_, ScheduleError>(loss)
///     })?;
///     std::fs::write("learning-rates.svg", found.plot("AdamW"))?;
///     Ok(found.suggestion())
/// }
/// ```
///
/// # Source
/// Smith, "Cyclical Learning Rates for Training Neural Networks" (2015); fastai's `lr_find`; Lightning's `lr_find`,
/// whose bias correction is one step ahead
#[doc(alias = "lr_find")]
#[derive(Clone, Copy, Debug)]
#[must_use = "it does nothing until `run`"]
pub struct LrFinder {
    min_lr: f64,
    max_lr: f64,
    num_training: u32,
    sweep: Sweep,
    early_stop_threshold: Option<f64>,
}

impl Default for LrFinder {
    fn default() -> Self {
        Self::new()
    }
}

impl LrFinder {
    /// 100 steps from 1e-8 to 1, by a constant factor; stops when the loss is 4 times the lowest.
    pub fn new() -> Self {
        Self {
            min_lr: 1e-8,
            max_lr: 1.0,
            num_training: 100,
            sweep: Sweep::Exponential,
            early_stop_threshold: Some(4.0),
        }
    }

    /// The first rate, above 0.
    pub fn min_lr(mut self, min_lr: f64) -> Self {
        self.min_lr = min_lr;
        self
    }

    /// The last rate, above the first.
    pub fn max_lr(mut self, max_lr: f64) -> Self {
        self.max_lr = max_lr;
        self
    }

    /// The number of steps, at least 2.
    pub fn num_training(mut self, steps: u32) -> Self {
        self.num_training = steps;
        self
    }

    /// How the rate rises.
    #[doc(alias = "mode")]
    pub fn sweep(mut self, sweep: Sweep) -> Self {
        self.sweep = sweep;
        self
    }

    /// Stops when the smoothed loss is above this many times the lowest one; `None` stops only at a loss that is
    /// infinite or NaN.
    pub fn early_stop_threshold(mut self, times: impl Into<Option<f64>>) -> Self {
        self.early_stop_threshold = times.into();
        self
    }

    /// Trains with `step`, which makes one training step (forward and backward pass, the optimizer's step and
    /// `zero_grad`) and returns the loss. All parameter groups get the same rate.
    ///
    /// # Errors
    /// When an option is out of range, the optimizer's state cannot be saved (tch's), a step fails, a loss is not one
    /// number, or libtorch fails. If the state from before cannot be restored, that error is returned instead.
    ///
    /// # Syncs
    /// Reads the loss at each step.
    pub fn run<M, O, E>(
        &self,
        model: &M,
        opt: &mut O,
        mut step: impl FnMut(&mut O) -> Result<Tensor, E>,
    ) -> Result<LrSweep, E>
    where
        M: Module,
        O: Optimizer + ?Sized,
        E: From<ScheduleError>,
    {
        self.check()?;
        let before = Some(Snapshot::of(model, opt)?);
        let mut sweeping = Sweeping { opt, before };
        let swept = self.train(sweeping.opt, &mut step);
        sweeping.end()?;
        swept
    }

    fn train<O, E>(&self, opt: &mut O, step: &mut impl FnMut(&mut O) -> Result<Tensor, E>) -> Result<LrSweep, E>
    where
        O: Optimizer + ?Sized,
        E: From<ScheduleError>,
    {
        let (mut lrs, mut losses) = (Vec::new(), Vec::new());
        let (mut average, mut lowest) = (0.0, f64::INFINITY);
        for number in 1..=self.num_training {
            let lr = self.lr(number);
            (0..opt.num_groups()).try_for_each(|group| opt.set_lr(group, lr)).map_err(ScheduleError::from)?;
            let loss = read(&step(opt)?)?;
            average = BETA * average + (1.0 - BETA) * loss;
            let smoothed = average / (1.0 - BETA.powf(f64::from(number)));
            if !smoothed.is_finite() {
                return Ok(LrSweep::new(lrs, losses, true));
            }
            lrs.push(lr);
            losses.push(smoothed);
            if number > 1 && self.early_stop_threshold.is_some_and(|times| smoothed > times * lowest) {
                return Ok(LrSweep::new(lrs, losses, true));
            }
            lowest = lowest.min(smoothed);
        }
        Ok(LrSweep::new(lrs, losses, false))
    }

    /// The rate of step `number`, counted from 1. As in Lightning, the second rate is two steps above the first.
    fn lr(&self, number: u32) -> f64 {
        let share = f64::from(number) / f64::from(self.num_training);
        match self.sweep {
            _ if number == 1 => self.min_lr,
            Sweep::Exponential => self.min_lr * (self.max_lr / self.min_lr).powf(share),
            Sweep::Linear => self.min_lr + share * (self.max_lr - self.min_lr),
        }
    }

    fn check(&self) -> Result<(), ScheduleError> {
        let check = Check("LrFinder");
        check.positive("min_lr", self.min_lr)?;
        let above = self.max_lr > self.min_lr && self.max_lr.is_finite();
        check.that(above, "max_lr", format_args!("finite and above min_lr ({})", self.min_lr), self.max_lr)?;
        check.that(self.num_training >= 2, "num_training", "at least 2", self.num_training)?;
        self.early_stop_threshold.map_or(Ok(()), |times| check.positive("early_stop_threshold", times))
    }
}

fn read(loss: &Tensor) -> Result<f64, ScheduleError> {
    let check = Check("LrFinder");
    check.that(loss.defined(), "loss", "one number", "an undefined tensor")?;
    check.that(loss.numel() == 1, "loss", "one number", format_args!("a tensor of shape {:?}", loss.size()))?;
    let value = loss.f_reshape([1]).and_then(|loss| loss.f_double_value(&[0]));
    value.map_err(|error| TorchError::from(error).into())
}

/// An optimizer during the sweep. If a panic drops it, it restores the state from before.
struct Sweeping<'a, O: Optimizer + ?Sized> {
    opt: &'a mut O,
    before: Option<Snapshot>,
}

impl<O: Optimizer + ?Sized> Sweeping<'_, O> {
    fn end(&mut self) -> Result<(), ScheduleError> {
        self.before.take().map_or(Ok(()), |before| before.restore(self.opt))
    }
}

impl<O: Optimizer + ?Sized> Drop for Sweeping<'_, O> {
    fn drop(&mut self) {
        // `drop` cannot return an error.
        let _ = self.end();
    }
}

/// What training changes: tensors, each with a copy, and the optimizer's state and rates.
struct Snapshot {
    tensors: Vec<(Tensor, Tensor)>,
    state: StateDict,
    lrs: Vec<Option<f64>>,
}

impl Snapshot {
    fn of<M: Module, O: Optimizer + ?Sized>(model: &M, opt: &O) -> Result<Self, ScheduleError> {
        let reason = "its state cannot be saved, and so not be restored: use an optimizer of overdrive-optim";
        let stateful = opt.as_stateful().ok_or(OptimizerError::DoesNotFit { part: "LrFinder", reason })?;
        let state = stateful.state_dict()?.copied()?;
        let _no_grad = tch::no_grad_guard();
        let own = model.named_parameters().into_iter().map(|it| it.tensor().shallow_clone());
        let buffers = model.named_buffers().into_iter().map(|(_, buffer)| buffer);
        // The optimizer may train a part of the model, or more than the model: each tensor is copied once.
        let mut seen = HashSet::new();
        let once = |tensor: &Tensor| seen.insert((tensor.data_ptr(), tensor.numel()));
        let copied = |tensor: Tensor| tensor.f_detach_copy().map(|copy| (tensor, copy));
        let tensors = own.chain(buffers).chain(opt.params()).filter(once).map(copied);
        let tensors = tensors.collect::<Result<_, _>>().map_err(TorchError::from)?;
        Ok(Self { tensors, state, lrs: (0..opt.num_groups()).map(|group| opt.lr(group)).collect() })
    }

    /// Restores the parameters first: the optimizer's state, restored after them, may hold float32 copies of them.
    fn restore<O: Optimizer + ?Sized>(self, opt: &mut O) -> Result<(), ScheduleError> {
        tch::no_grad(|| self.tensors.into_iter().try_for_each(|(mut tensor, copy)| tensor.f_copy_(&copy).map(drop)))
            .map_err(TorchError::from)?;
        // Otherwise SAM would undo the ascent of a failed step, although the parameters are already restored.
        opt.params_changed()?;
        let reason = "the optimizer had a state before the steps, and has none now";
        opt.as_stateful_mut().ok_or(StateError::NotSaved { reason })?.load_state_dict(&self.state)?;
        for (group, lr) in self.lrs.into_iter().enumerate() {
            lr.map_or(Ok(()), |lr| opt.set_lr(group, lr))?;
        }
        Ok(opt.zero_grad()?)
    }
}
