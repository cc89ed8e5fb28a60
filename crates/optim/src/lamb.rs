//! LAMB.

use overdrive_core::{OptimizerError, TorchError};
use tch::Tensor;

use crate::algorithm::{Algorithm, Field, Slot, Step, check_beta, check_not_negative};
use crate::builder::{GroupBuilder, Options};
use crate::foreach;
use crate::optimizer::GroupOptimizer;
use crate::trust::{as_list, at_most_one, norms, or_one};

/// LAMB, for large batches: an Adam update with decoupled weight decay, rescaled to the norm of the parameter, times
/// the learning rate (1e-3).
///
/// # Source
/// You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020, algorithm 2, with phi
/// the identity.
#[doc(alias = "LAMB")]
pub type Lamb = GroupOptimizer<LambOptions>;

/// The options of a [`Lamb`].
pub type LambBuilder = GroupBuilder<LambOptions>;

/// The options of a [`Lamb`] group, except the learning rate.
#[derive(Clone, Debug)]
pub struct LambOptions {
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
    adaptive: bool,
    always_adapt: bool,
    trust_clip: bool,
    max_grad_norm: Option<f64>,
    maximize: bool,
}

impl Default for LambOptions {
    fn default() -> Self {
        Self {
            betas: (0.9, 0.999),
            eps: 1e-6,
            weight_decay: 0.01,
            adaptive: true,
            always_adapt: true,
            trust_clip: false,
            max_grad_norm: None,
            maximize: false,
        }
    }
}

impl<Scope> Options<LambOptions, Scope> {
    /// The decay rates of the running averages of the gradient and its square, each in [0, 1); default (0.9, 0.999).
    pub fn betas(self, beta1: f64, beta2: f64) -> Self {
        self.with(move |options| options.betas = (beta1, beta2))
    }

    /// Added to the denominator; default 1e-6.
    pub fn eps(self, eps: f64) -> Self {
        self.with(move |options| options.eps = eps)
    }

    /// The weight decay: this times the parameter is added to the update before it is rescaled; default 0.01.
    pub fn weight_decay(self, weight_decay: f64) -> Self {
        self.with(move |options| options.weight_decay = weight_decay)
    }

    /// Whether an update is rescaled to the norm of its parameter; default true. Often false for groups of biases and
    /// gains.
    pub fn adaptive(self, adaptive: bool) -> Self {
        self.with(move |options| options.adaptive = adaptive)
    }

    /// The form of timm's `Lamb`, which follows apex's `FusedLAMB`: gradients are clipped to a norm of 1 over all
    /// groups, and groups without weight decay are not rescaled.
    ///
    /// # Source
    /// timm 1.0.22, `timm.optim.Lamb`
    #[doc(alias = "FusedLAMB")]
    pub fn timm(self) -> Self {
        self.max_grad_norm(Some(1.0)).always_adapt(false)
    }

    /// The maximum of the global gradient norm: if the 2-norm over the gradients of all groups exceeds it, this group's
    /// gradients are scaled down by the same ratio before the step; default none.
    pub fn max_grad_norm(self, max_grad_norm: Option<f64>) -> Self {
        self.with(move |options| options.max_grad_norm = max_grad_norm)
    }

    /// Whether a group without weight decay is rescaled too; default true.
    pub fn always_adapt(self, always_adapt: bool) -> Self {
        self.with(move |options| options.always_adapt = always_adapt)
    }

    /// Whether the trust ratio, the factor that rescales, is at most 1 (LAMBC); default false.
    pub fn trust_clip(self, trust_clip: bool) -> Self {
        self.with(move |options| options.trust_clip = trust_clip)
    }

    /// Maximizes the objective instead of minimizing it; default false.
    pub fn maximize(self, maximize: bool) -> Self {
        self.with(move |options| options.maximize = maximize)
    }
}

impl Algorithm for LambOptions {
    const LR: f64 = 1e-3;
    const COUNTS_STEPS: bool = true;

    fn check(&self) -> Result<(), OptimizerError> {
        check_beta("beta1", self.betas.0)?;
        check_beta("beta2", self.betas.1)?;
        check_not_negative("eps", self.eps)?;
        check_not_negative("weight_decay", self.weight_decay)?;
        let norm = self.max_grad_norm.unwrap_or(1.0);
        OptimizerError::check_range("max_grad_norm", norm, f64::MIN_POSITIVE..f64::INFINITY, "finite and above 0")
    }

    fn max_grad_norm(&self) -> Option<f64> {
        self.max_grad_norm
    }

    fn momentum(&mut self) -> Option<&mut f64> {
        Some(&mut self.betas.0)
    }

    fn fields(&mut self) -> Vec<(&'static str, Field<'_>)> {
        vec![
            ("betas.0", Field::Float(&mut self.betas.0)),
            ("betas.1", Field::Float(&mut self.betas.1)),
            ("eps", Field::Float(&mut self.eps)),
            ("weight_decay", Field::Float(&mut self.weight_decay)),
            ("adaptive", Field::Bool(&mut self.adaptive)),
            ("always_adapt", Field::Bool(&mut self.always_adapt)),
            ("trust_clip", Field::Bool(&mut self.trust_clip)),
            ("max_grad_norm", Field::Optional(&mut self.max_grad_norm)),
            ("maximize", Field::Bool(&mut self.maximize)),
        ]
    }

    fn slots(&self, _param: &Tensor) -> Vec<Slot> {
        ["exp_avg", "exp_avg_sq"].map(Slot::zeros).into()
    }

    fn step(&self, step: &Step<'_>) -> Result<(), TorchError> {
        let (beta1, beta2) = self.betas;
        let grads = step.signed_grads(self.maximize)?;
        let (exp_avgs, exp_avg_sqs) = (&step.slots[0], &step.slots[1]);
        foreach::lerp_(exp_avgs, &grads, 1.0 - beta1)?;
        foreach::mul_scalar_(exp_avg_sqs, beta2)?;
        foreach::addcmul_(exp_avg_sqs, &grads, &grads, 1.0 - beta2)?;

        // m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p
        let updates = foreach::sqrt(exp_avg_sqs)?;
        foreach::div_each_(&updates, &step.by_count(|count| (1.0 - beta2.powf(count)).sqrt())?)?;
        foreach::add_scalar_(&updates, self.eps)?;
        foreach::reciprocal_(&updates)?;
        foreach::mul_(&updates, exp_avgs)?;
        foreach::div_each_(&updates, &step.by_count(|count| 1.0 - beta1.powf(count))?)?;
        if self.weight_decay != 0.0 {
            foreach::add_(&updates, step.params, self.weight_decay)?;
        }
        if self.adaptive && (self.always_adapt || self.weight_decay != 0.0) {
            let (params, lengths) = (norms(step.params)?, norms(&updates)?);
            let ratios = or_one(&params.f_div(&lengths)?, &params, &lengths)?;
            let ratios = if self.trust_clip { at_most_one(&ratios)? } else { ratios };
            foreach::mul_(&updates, &as_list(&ratios)?)?;
        }
        foreach::add_(step.params, &updates, -step.lr)
    }
}
