//! Adam and AdamW.

use overdrive_core::{OptimizerError, TorchError};
use overdrive_ffi::{Arg, LazyOp, TensorList};
use tch::{Device, Kind, Tensor};

use crate::algorithm::{Algorithm, Field, Fusable, Slot, Step, check_beta, check_not_negative};
use crate::builder::{GroupBuilder, Options};
use crate::foreach::{self, Lent};
use crate::optimizer::GroupOptimizer;
use crate::options::OptionSet;

static FUSED_ADAM: LazyOp = LazyOp::new("aten::_fused_adam_", "");
static FUSED_ADAMW: LazyOp = LazyOp::new("aten::_fused_adamw_", "");

/// Adam, with weight decay as an L2 penalty; lr 1e-3.
///
/// # Source
/// `torch.optim.Adam`; Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015.
pub type Adam = GroupOptimizer<AdamOptions<false>>;

/// Adam with decoupled weight decay; lr 1e-3.
///
/// # Source
/// `torch.optim.AdamW`; Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
pub type AdamW = GroupOptimizer<AdamOptions<true>>;

/// The options of an [`Adam`].
pub type AdamBuilder = GroupBuilder<AdamOptions<false>>;

/// The options of an [`AdamW`].
pub type AdamWBuilder = GroupBuilder<AdamOptions<true>>;

/// The options of an [`Adam`] or [`AdamW`] group, except the learning rate.
#[derive(Clone, Debug)]
pub struct AdamOptions<const DECOUPLED_WEIGHT_DECAY: bool> {
    pub(crate) betas: (f64, f64),
    pub(crate) eps: f64,
    pub(crate) weight_decay: f64,
    amsgrad: bool,
    pub(crate) maximize: bool,
    capturable: bool,
}

impl<const DECOUPLED: bool> Default for AdamOptions<DECOUPLED> {
    fn default() -> Self {
        let weight_decay = if DECOUPLED { 1e-2 } else { 0.0 };
        Self { betas: (0.9, 0.999), eps: 1e-8, weight_decay, amsgrad: false, maximize: false, capturable: false }
    }
}

impl<const DECOUPLED: bool, Scope> Options<AdamOptions<DECOUPLED>, Scope> {
    /// The decay rates of the running averages of the gradient and its square, each in [0, 1); default (0.9, 0.999).
    pub fn betas(self, beta1: f64, beta2: f64) -> Self {
        self.with(move |options| options.betas = (beta1, beta2))
    }

    /// Added to the denominator; default 1e-8.
    pub fn eps(self, eps: f64) -> Self {
        self.with(move |options| options.eps = eps)
    }

    /// For AdamW, decoupled weight decay: a step multiplies a parameter by 1 - lr * weight_decay (default 0.01). For
    /// Adam, the L2 penalty, added to the gradient (default 0).
    pub fn weight_decay(self, weight_decay: f64) -> Self {
        self.with(move |options| options.weight_decay = weight_decay)
    }

    /// Divides by the largest second moment so far; default false.
    pub fn amsgrad(self, amsgrad: bool) -> Self {
        self.with(move |options| options.amsgrad = amsgrad)
    }

    /// Maximizes the objective instead of minimizing it; default false.
    pub fn maximize(self, maximize: bool) -> Self {
        self.with(move |options| options.maximize = maximize)
    }

    /// Keeps the step counts on the parameters' device and never reads them on the host, so that a CUDA graph can
    /// capture the step; default false. The fused kernels always do so. The learning rate is a plain number: a captured
    /// graph keeps the value it was captured with.
    pub fn capturable(self, capturable: bool) -> Self {
        self.with(move |options| options.capturable = capturable)
    }
}

impl<const DECOUPLED: bool> Fusable for AdamOptions<DECOUPLED> {}

impl<const DECOUPLED: bool> OptionSet for AdamOptions<DECOUPLED> {
    fn check_ranges(&self) -> Result<(), OptimizerError> {
        check_beta("beta1", self.betas.0)?;
        check_beta("beta2", self.betas.1)?;
        check_not_negative("eps", self.eps)?;
        check_not_negative("weight_decay", self.weight_decay)
    }

    fn fields(&mut self) -> Vec<(String, Field<'_>)> {
        let fields = [
            ("betas.0", Field::Float(&mut self.betas.0)),
            ("betas.1", Field::Float(&mut self.betas.1)),
            ("eps", Field::Float(&mut self.eps)),
            ("weight_decay", Field::Float(&mut self.weight_decay)),
            ("amsgrad", Field::Bool(&mut self.amsgrad)),
            ("maximize", Field::Bool(&mut self.maximize)),
            // Adam adds the decay to the gradient; AdamW subtracts it from the weight.
            ("decoupled_weight_decay", Field::Fixed(DECOUPLED)),
        ];
        fields.map(|(name, field)| (name.to_owned(), field)).into()
    }
}

impl<const DECOUPLED: bool> Algorithm for AdamOptions<DECOUPLED> {
    const LR: f64 = 1e-3;
    const COUNTS_STEPS: bool = true;
    const ELEMENTWISE: bool = true;

    fn has_fused_kernel(device: Device, _kind: Kind) -> bool {
        matches!(device, Device::Cpu | Device::Cuda(_) | Device::Mps)
    }

    fn counts_on_device(&self) -> bool {
        self.capturable
    }

    fn momentum(&mut self) -> Option<&mut f64> {
        Some(&mut self.betas.0)
    }

    fn slots(&self, _param: &Tensor) -> Vec<Slot> {
        let names = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"];
        names.into_iter().take(2 + usize::from(self.amsgrad)).map(Slot::zeros).collect()
    }

    fn step(&self, step: &Step<'_>) -> Result<(), TorchError> {
        match step.fused {
            true => self.fused(step, if DECOUPLED { &FUSED_ADAMW } else { &FUSED_ADAM }),
            false => self.foreach(step),
        }
    }
}

impl<const DECOUPLED: bool> AdamOptions<DECOUPLED> {
    fn fused(&self, step: &Step<'_>, kernel: &LazyOp) -> Result<(), TorchError> {
        let none = TensorList::new::<Tensor>(&[])?;
        kernel.call(&[
            Arg::TensorList(step.params),
            Arg::TensorList(step.grads),
            Arg::TensorList(&step.slots[0]),
            Arg::TensorList(&step.slots[1]),
            Arg::TensorList(step.slots.get(2).unwrap_or(&none)),
            Arg::TensorList(step.counts),
            Arg::Double(step.lr),
            Arg::Double(self.betas.0),
            Arg::Double(self.betas.1),
            Arg::Double(self.weight_decay),
            Arg::Double(self.eps),
            Arg::Bool(self.amsgrad),
            Arg::Bool(self.maximize),
            step.scale.and_then(|scale| scale.scale).into(),
            step.scale.map(|scale| scale.found_inf).into(),
        ])?;
        Ok(())
    }

    fn foreach(&self, step: &Step<'_>) -> Result<(), TorchError> {
        let (beta1, beta2) = self.betas;
        let grads = step.decayed_grads(self.maximize, self.weight_decay, DECOUPLED)?;
        let (exp_avgs, exp_avg_sqs) = (&step.slots[0], &step.slots[1]);
        foreach::lerp_(exp_avgs, &grads, 1.0 - beta1)?;
        foreach::mul_scalar_(exp_avg_sqs, beta2)?;
        foreach::addcmul_(exp_avg_sqs, &grads, &grads, 1.0 - beta2)?;
        // Freed before the denominators are allocated.
        drop::<Lent<'_>>(grads);
        let denominators = match step.slots.get(2) {
            Some(largest) => {
                foreach::maximum_(largest, exp_avg_sqs)?;
                foreach::sqrt(largest)?
            }
            None => foreach::sqrt(exp_avg_sqs)?,
        };
        if self.capturable {
            return self.divide_on_device(step, &denominators);
        }
        let step_sizes = step.by_count(|count| -step.lr / (1.0 - beta1.powf(count)))?;
        foreach::div_each_(&denominators, &step.by_count(|count| (1.0 - beta2.powf(count)).sqrt())?)?;
        foreach::add_scalar_(&denominators, self.eps)?;
        foreach::addcdiv_each_(step.params, exp_avgs, &denominators, &step_sizes)
    }

    /// The end of a step, with bias corrections computed on the device that holds the counts.
    fn divide_on_device(&self, step: &Step<'_>, denominators: &TensorList) -> Result<(), TorchError> {
        // (beta1^t - 1) / lr, which is minus one over the step size.
        let inverse_sizes = foreach::scalar_pow(self.betas.0, step.counts)?;
        foreach::sub_scalar_(&inverse_sizes, 1.0)?;
        foreach::div_scalar_(&inverse_sizes, step.lr)?;
        // sqrt(1 - beta2^t)
        let corrections = foreach::scalar_pow(self.betas.1, step.counts)?;
        foreach::sub_scalar_(&corrections, 1.0)?;
        foreach::neg_(&corrections)?;
        foreach::sqrt_(&corrections)?;
        foreach::div_(denominators, &corrections)?;
        foreach::add_scalar_(denominators, self.eps)?;
        foreach::mul_(denominators, &inverse_sizes)?;
        foreach::addcdiv_(step.params, &step.slots[0], denominators, 1.0)
    }
}
