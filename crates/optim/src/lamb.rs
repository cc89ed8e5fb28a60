//! LAMB.

use overdrive_core::TorchError;
use tch::Tensor;

use crate::algorithm::{Algorithm, Slot, Step};
use crate::builder::{GroupBuilder, Options};
use crate::foreach;
use crate::optimizer::GroupOptimizer;
use crate::options::{BETA, NOT_NEGATIVE, options};
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

options! {
    /// The options of a [`Lamb`] group, except the learning rate.
    LambOptions {
        /// The decay rates of the running averages of the gradient and its square, each in [0, 1); default (0.9,
        /// 0.999).
        betas(beta1: f64, beta2: f64) = (0.9, 0.999), BETA;
        /// Added to the denominator; default 1e-6.
        eps: f64 = 1e-6, NOT_NEGATIVE;
        /// The weight decay: this times the parameter is added to the update before it is rescaled; default 0.01.
        weight_decay: f64 = 0.01, NOT_NEGATIVE;
        /// Whether an update is rescaled to the norm of its parameter; default true. Often false for biases and
        /// the weights of norm layers.
        adaptive: bool = true;
        /// Whether a group without weight decay is rescaled too; default true.
        always_adapt: bool = true;
        /// Whether the trust ratio, the factor that rescales, is at most 1 (LAMBC); default false.
        trust_clip: bool = false;
        /// The maximum of the global gradient norm: if the 2-norm over the gradients of all groups exceeds it, this
        /// group's gradients are multiplied by maximum / norm before the step; default none.
        max_grad_norm: Option<f64> = None, (f64::MIN_POSITIVE..f64::INFINITY, "finite and above 0");
        /// Maximizes the objective instead of minimizing it; default false.
        maximize: bool = false;
    }
}

impl<Scope> Options<LambOptions, Scope> {
    /// The form of timm's `Lamb`, which follows apex's `FusedLAMB`: gradients are clipped to a norm of 1 over all
    /// groups, and groups without weight decay are not rescaled.
    ///
    /// # Source
    /// timm 1.0.22, `timm.optim.Lamb`
    #[doc(alias = "FusedLAMB")]
    pub fn timm(self) -> Self {
        self.max_grad_norm(Some(1.0)).always_adapt(false)
    }
}

impl Algorithm for LambOptions {
    const LR: f64 = 1e-3;
    const COUNTS_STEPS: bool = true;
    const COUPLES_ELEMENTS: bool = true;

    fn max_grad_norm(&self) -> Option<f64> {
        self.max_grad_norm
    }

    fn momentum(&mut self) -> Option<&mut f64> {
        Some(&mut self.betas.0)
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
            let (param_norms, update_norms) = (norms(step.params)?, norms(&updates)?);
            let ratios = or_one(&param_norms.f_div(&update_norms)?, &param_norms, &update_norms)?;
            let ratios = if self.trust_clip { at_most_one(&ratios)? } else { ratios };
            foreach::mul_(&updates, &as_list(&ratios)?)?;
        }
        foreach::add_(step.params, &updates, -step.lr)
    }
}
