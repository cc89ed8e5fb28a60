//! Adamax.

use overdrive_core::TorchError;
use tch::Tensor;

use crate::algorithm::{Algorithm, Slot, Step};
use crate::builder::GroupBuilder;
use crate::foreach::{self, Lent};
use crate::optimizer::GroupOptimizer;
use crate::options::{BETA, NOT_NEGATIVE, options};

/// Adamax, the form of Adam that divides by the largest recent gradient; lr 2e-3.
///
/// # Source
/// `torch.optim.Adamax`; Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2014.
pub type Adamax = GroupOptimizer<AdamaxOptions>;

/// The options of an [`Adamax`].
pub type AdamaxBuilder = GroupBuilder<AdamaxOptions>;

options! {
    /// The options of an [`Adamax`] group, except the learning rate.
    AdamaxOptions {
        /// The decay rates of the average of gradients and of their largest size, each in [0, 1); default (0.9, 0.999).
        betas(beta1: f64, beta2: f64) = (0.9, 0.999), BETA;
        /// Added to the gradient's size; default 1e-8.
        eps: f64 = 1e-8, NOT_NEGATIVE;
        /// The L2 penalty, added to the gradient; default 0.
        weight_decay: f64 = 0.0, NOT_NEGATIVE;
        /// Maximizes the objective instead of minimizing it; default false.
        maximize: bool = false;
    }
}

impl Algorithm for AdamaxOptions {
    const LR: f64 = 2e-3;
    const COUNTS_STEPS: bool = true;
    const ELEMENTWISE: bool = true;

    fn momentum(&mut self) -> Option<&mut f64> {
        Some(&mut self.betas.0)
    }

    fn slots(&self, _param: &Tensor) -> Vec<Slot> {
        vec![Slot::zeros("exp_avg"), Slot::zeros("exp_inf")]
    }

    fn step(&self, step: &Step<'_>) -> Result<(), TorchError> {
        let (beta1, beta2) = self.betas;
        let grads = step.penalised_grads(self.maximize, self.weight_decay)?;
        let (exp_avgs, exp_infs) = (&step.slots[0], &step.slots[1]);
        foreach::lerp_(exp_avgs, &grads, 1.0 - beta1)?;
        foreach::mul_scalar_(exp_infs, beta2)?;
        let sizes = match grads {
            Lent::Given(grads) => foreach::abs(grads)?,
            Lent::Made(grads) => {
                foreach::abs_(&grads)?;
                grads
            }
        };
        foreach::add_scalar_(&sizes, self.eps)?;
        foreach::maximum_(exp_infs, &sizes)?;
        let step_sizes = step.by_count(|count| -step.lr / (1.0 - beta1.powf(count)))?;
        foreach::addcdiv_each_(step.params, exp_avgs, exp_infs, &step_sizes)
    }
}
