//! Schedule-free SGD and AdamW.

use overdrive_core::{MOVED, Optimizer, OptimizerError, TorchError};
use tch::Tensor;

use crate::algorithm::{Algorithm, Field, Slot, Step, check_beta, check_not_negative};
use crate::builder::{GroupBuilder, Options};
use crate::foreach::{self, Lent};
use crate::optimizer::{GroupOptimizer, Values};
use crate::options::OptionSet;

/// Schedule-free SGD: an average of the weights takes the place of a schedule; lr 1.
///
/// In training mode, as after `build`, the parameters are where gradients are computed: between the average and the
/// weights `z` that SGD steps. Call [`eval`](Self::eval) before an evaluation: the parameters then are the average, and a
/// step is an error; and [`train`](Self::train) before training goes on.
///
/// The state holds `z` and the mode, so that a run resumes exactly from the model's and the optimizer's states of either
/// mode; a model that is saved for use should be saved in evaluation mode. When weights are loaded later, call
/// [`params_changed`](overdrive_core::Optimizer::params_changed): `z` and the average restart at them. The
/// running statistics of batch norm layers are those of the training mode's weights: call `overdrive_nn::update_bn` in
/// evaluation mode.
///
/// # Source
/// `schedulefree.SGDScheduleFree`; Defazio et al., "The Road Less Scheduled", 2024. There it starts in evaluation mode.
#[doc(alias = "SGDScheduleFree")]
pub type SgdScheduleFree = GroupOptimizer<ScheduleFreeOptions<false>>;

/// Schedule-free AdamW, see [`SgdScheduleFree`]; lr 2.5e-3.
///
/// # Source
/// `schedulefree.AdamWScheduleFree`
pub type AdamWScheduleFree = GroupOptimizer<ScheduleFreeOptions<true>>;

/// The options of an [`SgdScheduleFree`].
pub type SgdScheduleFreeBuilder = GroupBuilder<ScheduleFreeOptions<false>>;

/// The options of an [`AdamWScheduleFree`].
pub type AdamWScheduleFreeBuilder = GroupBuilder<ScheduleFreeOptions<true>>;

/// The options of an [`SgdScheduleFree`] or [`AdamWScheduleFree`] group, except the learning rate.
#[derive(Clone, Debug)]
pub struct ScheduleFreeOptions<const ADAMW: bool> {
    /// SGD's momentum, or the first of AdamW's betas.
    momentum: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
    warmup_steps: i64,
    r: f64,
    weight_lr_power: f64,
    train_mode: bool,
    /// The number of steps.
    k: i64,
    /// The sum of the weights that the averaged points have.
    weight_sum: f64,
    lr_max: f64,
    /// The learning rate of this step, with the warm-up.
    rate: f64,
    /// The newest point's share of the average.
    share: f64,
}

impl<const ADAMW: bool> Default for ScheduleFreeOptions<ADAMW> {
    fn default() -> Self {
        Self {
            momentum: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            warmup_steps: 0,
            r: 0.0,
            weight_lr_power: 2.0,
            train_mode: true,
            k: 0,
            weight_sum: 0.0,
            lr_max: -1.0,
            rate: 0.0,
            share: 0.0,
        }
    }
}

impl<Scope> Options<ScheduleFreeOptions<false>, Scope> {
    /// How close to the average gradients are computed, above 0 and below 1; default 0.9. Change it in evaluation mode.
    pub fn momentum(self, momentum: f64) -> Self {
        self.with(move |options| options.momentum = momentum)
    }
}

impl<Scope> Options<ScheduleFreeOptions<true>, Scope> {
    /// How close to the average gradients are computed, above 0 and below 1, and the decay rate of the average of squares;
    /// default (0.9, 0.999). Change the first in evaluation mode.
    pub fn betas(self, beta1: f64, beta2: f64) -> Self {
        self.with(move |options| (options.momentum, options.beta2) = (beta1, beta2))
    }

    /// Added to the denominator; default 1e-8.
    pub fn eps(self, eps: f64) -> Self {
        self.with(move |options| options.eps = eps)
    }
}

impl<const ADAMW: bool, Scope> Options<ScheduleFreeOptions<ADAMW>, Scope> {
    /// For SGD the L2 penalty, for AdamW decoupled weight decay, at the parameters of the training mode; default 0.
    pub fn weight_decay(self, weight_decay: f64) -> Self {
        self.with(move |options| options.weight_decay = weight_decay)
    }

    /// The number of steps in which the learning rate rises to its value; default 0.
    pub fn warmup_steps(self, steps: i64) -> Self {
        self.with(move |options| options.warmup_steps = steps)
    }

    /// The power of the step's number in a point's weight in the average; default 0.
    pub fn r(self, r: f64) -> Self {
        self.with(move |options| options.r = r)
    }

    /// The power of the highest learning rate so far in a point's weight in the average; default 2.
    pub fn weight_lr_power(self, power: f64) -> Self {
        self.with(move |options| options.weight_lr_power = power)
    }
}

impl<const ADAMW: bool> GroupOptimizer<ScheduleFreeOptions<ADAMW>> {
    /// Switches to training mode: the parameters move to where gradients are computed. Does nothing in that mode.
    ///
    /// # Errors
    /// When libtorch fails.
    ///
    /// # Syncs
    /// No.
    pub fn train(&mut self) -> Result<(), OptimizerError> {
        self.switch(true)
    }

    /// Switches to evaluation mode: the parameters become the averages. Does nothing in that mode.
    ///
    /// # Errors
    /// When libtorch fails.
    ///
    /// # Syncs
    /// No.
    pub fn eval(&mut self) -> Result<(), OptimizerError> {
        self.switch(false)
    }

    /// Whether it is in training mode, in which it can step.
    pub fn is_training(&self) -> bool {
        self.groups.iter().all(|group| group.values.options.train_mode)
    }

    fn switch(&mut self, train_mode: bool) -> Result<(), OptimizerError> {
        let _no_grad = tch::no_grad_guard();
        if let Some(index) = MOVED.position(&self.params.to_vec()?) {
            let reason = "SAM's `ascend` has moved it: call `step` or `step_skipped` first, which move it back";
            return Err(OptimizerError::parameter(&self.parameters()[index], index, reason));
        }
        for group in self.groups.iter_mut().filter(|group| group.values.options.train_mode != train_mode) {
            let momentum = group.values.options.momentum;
            let weight = if train_mode { 1.0 - momentum } else { 1.0 - 1.0 / momentum };
            for bucket in &mut group.buckets {
                bucket.with_first_slot(|params, z| foreach::lerp_(params, z, weight))?;
            }
            group.values.options.train_mode = train_mode;
        }
        Ok(())
    }
}

impl<const ADAMW: bool> OptionSet for ScheduleFreeOptions<ADAMW> {
    fn check_ranges(&self) -> Result<(), OptimizerError> {
        let name = if ADAMW { "beta1" } else { "momentum" };
        OptimizerError::check_range(name, self.momentum, f64::MIN_POSITIVE..1.0, "above 0 and below 1")?;
        check_beta("beta2", self.beta2)?;
        let finite = f64::MIN..f64::INFINITY;
        for (option, found) in [("r", self.r), ("weight_lr_power", self.weight_lr_power), ("lr_max", self.lr_max)] {
            OptimizerError::check_range(option, found, finite.clone(), "a finite number")?;
        }
        let not_negative = [
            ("eps", self.eps),
            ("weight_decay", self.weight_decay),
            ("warmup_steps", self.warmup_steps as f64),
            ("k", self.k as f64),
            ("weight_sum", self.weight_sum),
        ];
        not_negative.into_iter().try_for_each(|(option, found)| check_not_negative(option, found))
    }

    fn fields(&mut self) -> Vec<(String, Field<'_>)> {
        let mut fields = vec![(if ADAMW { "betas.0" } else { "momentum" }, Field::Float(&mut self.momentum))];
        if ADAMW {
            fields.extend([("betas.1", Field::Float(&mut self.beta2)), ("eps", Field::Float(&mut self.eps))]);
        }
        fields.extend([
            ("weight_decay", Field::Float(&mut self.weight_decay)),
            ("warmup_steps", Field::Int(&mut self.warmup_steps)),
            ("r", Field::Float(&mut self.r)),
            ("weight_lr_power", Field::Float(&mut self.weight_lr_power)),
            ("train_mode", Field::Bool(&mut self.train_mode)),
            ("k", Field::Int(&mut self.k)),
            ("weight_sum", Field::Float(&mut self.weight_sum)),
            ("lr_max", Field::Float(&mut self.lr_max)),
        ]);
        fields.into_iter().map(|(name, field)| (name.to_owned(), field)).collect()
    }
}

impl<const ADAMW: bool> Algorithm for ScheduleFreeOptions<ADAMW> {
    const LR: f64 = if ADAMW { 0.0025 } else { 1.0 };
    const COUNTS_STEPS: bool = false;
    const ELEMENTWISE: bool = true;
    const STEPS_ALONE: bool = false;
    const KEEPS_COPY: bool = true;

    fn begin(groups: &mut [Values<Self>], _pass: usize) -> Result<bool, OptimizerError> {
        if groups.iter().any(|group| !group.options.train_mode) {
            return Err(OptimizerError::InEvaluation);
        }
        for Values { lr, options } in groups {
            options.k += 1;
            let step = options.k as f64;
            let is_warming = options.k <= options.warmup_steps;
            options.rate = *lr * if is_warming { step / options.warmup_steps as f64 } else { 1.0 };
            options.lr_max = options.lr_max.max(options.rate);
            let weight = step.powf(options.r) * options.lr_max.powf(options.weight_lr_power);
            options.weight_sum += weight;
            options.share = if options.weight_sum == 0.0 { 0.0 } else { weight / options.weight_sum };
        }
        Ok(true)
    }

    fn slots(&self, _param: &Tensor) -> Vec<Slot> {
        let squares = ADAMW.then(|| Slot::zeros("exp_avg_sq"));
        [Slot::copy("z")].into_iter().chain(squares).collect()
    }

    fn step(&self, step: &Step<'_>) -> Result<(), TorchError> {
        let z = &step.slots[0];
        // A parameter may have been loaded since its bucket's first step.
        if step.first.contains(&true) {
            foreach::copy_(&z.select(step.first)?, &step.params.select(step.first)?)?;
        }
        let grads = match step.slots.get(1) {
            Some(squares) => {
                foreach::mul_scalar_(squares, self.beta2)?;
                foreach::addcmul_(squares, step.grads, step.grads, 1.0 - self.beta2)?;
                let denominators = foreach::div_scalar(squares, 1.0 - self.beta2.powf(self.k as f64))?;
                foreach::sqrt_(&denominators)?;
                foreach::add_scalar_(&denominators, self.eps)?;
                let grads = foreach::div(step.grads, &denominators)?;
                if self.weight_decay != 0.0 {
                    foreach::add_(&grads, step.params, self.weight_decay)?;
                }
                Lent::Made(grads)
            }
            None => step.penalised_grads(false, self.weight_decay)?,
        };
        foreach::lerp_(step.params, z, self.share)?;
        foreach::add_(step.params, &grads, self.rate * (self.momentum * (1.0 - self.share) - 1.0))?;
        foreach::add_(z, &grads, -self.rate)
    }
}
