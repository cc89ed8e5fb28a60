//! NAdam.

use overdrive_core::TorchError;
use tch::Tensor;

use crate::algorithm::{Algorithm, Slot, Step, power_of_half};
use crate::builder::GroupBuilder;
use crate::foreach;
use crate::optimizer::GroupOptimizer;
use crate::options::{BETA, NOT_NEGATIVE, options};

/// NAdam, Adam with Nesterov momentum; lr 2e-3.
///
/// # Source
/// `torch.optim.NAdam`; Dozat, "Incorporating Nesterov Momentum into Adam", 2016.
pub type NAdam = GroupOptimizer<NAdamOptions>;

/// The options of an [`NAdam`].
pub type NAdamBuilder = GroupBuilder<NAdamOptions>;

options! {
    /// The options of an [`NAdam`] group, except the learning rate.
    NAdamOptions {
        /// The decay rates of the running averages of the gradient and its square, each in [0, 1); default (0.9,
        /// 0.999).
        betas(beta1: f64, beta2: f64) = (0.9, 0.999), BETA;
        /// Added to the denominator; default 1e-8.
        eps: f64 = 1e-8, NOT_NEGATIVE;
        /// The L2 penalty, added to the gradient, or the decoupled weight decay; default 0.
        weight_decay: f64 = 0.0, NOT_NEGATIVE;
        /// How fast the momentum rises from half of beta1 to beta1: at step t it is beta1 * (1 - 0.96^(t *
        /// momentum_decay) / 2); default 4e-3.
        momentum_decay: f64 = 4e-3, NOT_NEGATIVE;
        /// Whether a step multiplies a parameter by 1 - lr * weight_decay, as in AdamW; default false.
        decoupled_weight_decay: bool = false;
        /// Maximizes the objective instead of minimizing it; default false.
        maximize: bool = false;
    }
}

impl Algorithm for NAdamOptions {
    const LR: f64 = 2e-3;
    const COUNTS_STEPS: bool = true;

    fn momentum(&mut self) -> Option<&mut f64> {
        Some(&mut self.betas.0)
    }

    fn slots(&self, _param: &Tensor) -> Vec<Slot> {
        // On the host, which reads it in every step.
        vec![Slot::zeros("exp_avg"), Slot::zeros("exp_avg_sq"), Slot::host_scalar("mu_product", 1.0)]
    }

    fn step(&self, step: &Step<'_>) -> Result<(), TorchError> {
        let (beta1, beta2) = self.betas;
        let grads = step.decayed_grads(self.maximize, self.weight_decay, self.decoupled_weight_decay)?;
        let (exp_avgs, exp_avg_sqs, products) = (&step.slots[0], &step.slots[1], &step.slots[2]);
        foreach::lerp_(exp_avgs, &grads, 1.0 - beta1)?;
        foreach::mul_scalar_(exp_avg_sqs, beta2)?;
        foreach::addcmul_(exp_avg_sqs, &grads, &grads, 1.0 - beta2)?;
        let denominators = foreach::sqrt(exp_avg_sqs)?;
        foreach::div_each_(&denominators, &step.by_count(|count| power_of_half(1.0 - beta2.powf(count)))?)?;
        foreach::add_scalar_(&denominators, self.eps)?;

        let momentum = |count: f64| beta1 * (1.0 - 0.5 * 0.96f64.powf(count * self.momentum_decay));
        let (now, next) = (step.by_count(momentum)?, step.by_count(|count| momentum(count + 1.0))?);
        foreach::mul_each_(products, &now)?;
        let (mut of_grads, mut of_averages) = (Vec::new(), Vec::new());
        for ((product, now), next) in products.to_vec()?.iter().zip(now).zip(next) {
            // Rounded to float32, as PyTorch keeps it.
            let product = product.f_double_value(&[])?;
            of_grads.push(-(step.lr * (1.0 - now) / (1.0 - product)));
            of_averages.push(-(step.lr * next / (1.0 - product * next)));
        }
        foreach::addcdiv_each_(step.params, &grads, &denominators, &of_grads)?;
        foreach::addcdiv_each_(step.params, exp_avgs, &denominators, &of_averages)
    }
}
