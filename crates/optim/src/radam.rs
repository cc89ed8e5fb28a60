//! RAdam.

use overdrive_core::{OptimizerError, TorchError};
use tch::Tensor;

use crate::algorithm::{Algorithm, Field, Slot, Step, check_beta, check_not_negative, power_of_half};
use crate::builder::{GroupBuilder, Options};
use crate::foreach;
use crate::optimizer::GroupOptimizer;

/// RAdam: steps like SGD with momentum until the average of squared gradients is reliable, then like Adam; lr 1e-3.
///
/// # Source
/// `torch.optim.RAdam`; Liu et al., "On the Variance of the Adaptive Learning Rate and Beyond", 2020.
pub type RAdam = GroupOptimizer<RAdamOptions>;

/// The options of an [`RAdam`].
pub type RAdamBuilder = GroupBuilder<RAdamOptions>;

/// The options of an [`RAdam`] group, except the learning rate.
#[derive(Clone, Debug)]
pub struct RAdamOptions {
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
    decoupled_weight_decay: bool,
    maximize: bool,
}

impl Default for RAdamOptions {
    fn default() -> Self {
        let (betas, eps) = ((0.9, 0.999), 1e-8);
        Self { betas, eps, weight_decay: 0.0, decoupled_weight_decay: false, maximize: false }
    }
}

impl<Scope> Options<RAdamOptions, Scope> {
    /// The decay rates of the running averages of the gradient and its square, each in [0, 1); default (0.9, 0.999).
    pub fn betas(self, beta1: f64, beta2: f64) -> Self {
        self.with(move |options| options.betas = (beta1, beta2))
    }

    /// Added to the denominator; default 1e-8.
    pub fn eps(self, eps: f64) -> Self {
        self.with(move |options| options.eps = eps)
    }

    /// The L2 penalty, added to the gradient, or the decoupled weight decay; default 0.
    pub fn weight_decay(self, weight_decay: f64) -> Self {
        self.with(move |options| options.weight_decay = weight_decay)
    }

    /// Whether a step multiplies a parameter by 1 - lr * weight_decay, as in AdamW and the paper's code; default false.
    pub fn decoupled_weight_decay(self, decoupled: bool) -> Self {
        self.with(move |options| options.decoupled_weight_decay = decoupled)
    }

    /// Maximizes the objective instead of minimizing it; default false.
    pub fn maximize(self, maximize: bool) -> Self {
        self.with(move |options| options.maximize = maximize)
    }
}

impl Algorithm for RAdamOptions {
    const LR: f64 = 1e-3;
    const COUNTS_STEPS: bool = true;
    const ELEMENTWISE: bool = true;

    fn check(&self) -> Result<(), OptimizerError> {
        check_beta("beta1", self.betas.0)?;
        check_beta("beta2", self.betas.1)?;
        check_not_negative("eps", self.eps)?;
        check_not_negative("weight_decay", self.weight_decay)
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
            ("decoupled_weight_decay", Field::Bool(&mut self.decoupled_weight_decay)),
            ("maximize", Field::Bool(&mut self.maximize)),
        ]
    }

    fn slots(&self, _param: &Tensor) -> Vec<Slot> {
        vec![Slot::zeros("exp_avg"), Slot::zeros("exp_avg_sq")]
    }

    fn step(&self, step: &Step<'_>) -> Result<(), TorchError> {
        let (beta1, beta2) = self.betas;
        let grads = step.decayed_grads(self.maximize, self.weight_decay, self.decoupled_weight_decay)?;
        let (exp_avgs, exp_avg_sqs) = (&step.slots[0], &step.slots[1]);
        foreach::lerp_(exp_avgs, &grads, 1.0 - beta1)?;
        foreach::mul_scalar_(exp_avg_sqs, beta2)?;
        foreach::addcmul_(exp_avg_sqs, &grads, &grads, 1.0 - beta2)?;
        drop(grads);

        let rate = |count: f64, share: f64| step.lr * share / (1.0 - beta1.powf(count));
        let adaptive = step.by_count(|count| {
            let correction = power_of_half(1.0 - beta2.powf(count));
            -(correction * rate(count, rectification(beta2, count)))
        })?;
        let plain = |count| if rectification(beta2, count) > 0.0 { 0.0 } else { 1.0 };
        let plain = step.by_count(|count| -rate(count, plain(count)))?;
        // Only one of the two rates is not 0: the factors are adaptive / (root + eps), or plain.
        let factors = foreach::sqrt(exp_avg_sqs)?;
        foreach::add_scalar_(&factors, self.eps)?;
        foreach::div_each_(&factors, &adaptive)?;
        foreach::reciprocal_(&factors)?;
        foreach::add_each_(&factors, &plain)?;
        foreach::addcmul_(step.params, exp_avgs, &factors, 1.0)
    }
}

/// The factor that corrects the variance of the adaptive step after `count` steps; 0 while the average of squares holds
/// too few gradients.
fn rectification(beta2: f64, count: f64) -> f64 {
    let longest = 2.0 / (1.0 - beta2) - 1.0;
    let decay = beta2.powf(count);
    let length = longest - 2.0 * count * decay / (1.0 - decay);
    match length > 5.0 {
        true => {
            let rising = (length - 4.0) * (length - 2.0) * longest;
            power_of_half(rising / ((longest - 4.0) * (longest - 2.0) * length))
        }
        false => 0.0,
    }
}
