//! RAdam.

use overdrive_core::TorchError;
use tch::Tensor;

use crate::algorithm::{Algorithm, Slot, Step, power_of_half};
use crate::builder::GroupBuilder;
use crate::foreach;
use crate::optimizer::GroupOptimizer;
use crate::options::{BETA, NOT_NEGATIVE, options};

/// RAdam: steps like SGD with momentum until the average of squared gradients is reliable, then like Adam; lr 1e-3.
///
/// # Source
/// `torch.optim.RAdam`; Liu et al., "On the Variance of the Adaptive Learning Rate and Beyond", 2020.
pub type RAdam = GroupOptimizer<RAdamOptions>;

/// The options of an [`RAdam`].
pub type RAdamBuilder = GroupBuilder<RAdamOptions>;

options! {
    /// The options of an [`RAdam`] group, except the learning rate.
    RAdamOptions {
        /// The decay rates of the running averages of the gradient and its square, each in [0, 1); default (0.9,
        /// 0.999).
        betas(beta1: f64, beta2: f64) = (0.9, 0.999), BETA;
        /// Added to the denominator; default 1e-8.
        eps: f64 = 1e-8, NOT_NEGATIVE;
        /// The L2 penalty, added to the gradient, or the decoupled weight decay; default 0.
        weight_decay: f64 = 0.0, NOT_NEGATIVE;
        /// Whether a step multiplies a parameter by 1 - lr * weight_decay, as in AdamW and the paper's code; default
        /// false.
        decoupled_weight_decay: bool = false;
        /// Maximizes the objective instead of minimizing it; default false.
        maximize: bool = false;
    }
}

impl Algorithm for RAdamOptions {
    const LR: f64 = 1e-3;
    const COUNTS_STEPS: bool = true;
    const ELEMENTWISE: bool = true;

    fn momentum(&mut self) -> Option<&mut f64> {
        Some(&mut self.betas.0)
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
