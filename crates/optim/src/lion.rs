//! Lion.

use overdrive_core::TorchError;
use tch::Tensor;

use crate::algorithm::{Algorithm, Slot, Step};
use crate::builder::GroupBuilder;
use crate::foreach;
use crate::optimizer::GroupOptimizer;
use crate::options::{BETA, NOT_NEGATIVE, options};

/// Lion: steps by the sign of an average of gradients, with one number of state per parameter; lr 1e-4.
///
/// # Source
/// Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023.
pub type Lion = GroupOptimizer<LionOptions>;

/// The options of a [`Lion`].
pub type LionBuilder = GroupBuilder<LionOptions>;

options! {
    /// The options of a [`Lion`] group, except the learning rate.
    LionOptions {
        /// The weight of the average (against the new gradient) in the sign, and the average's decay rate, each in [0,
        /// 1); default (0.9, 0.99).
        betas(beta1: f64, beta2: f64) = (0.9, 0.99), BETA;
        /// Decoupled weight decay: a step multiplies a parameter by 1 - lr * weight_decay; default 0.
        weight_decay: f64 = 0.0, NOT_NEGATIVE;
        /// Maximizes the objective instead of minimizing it; default false.
        maximize: bool = false;
    }
}

impl Algorithm for LionOptions {
    const LR: f64 = 1e-4;
    const COUNTS_STEPS: bool = false;
    const ELEMENTWISE: bool = true;

    fn momentum(&mut self) -> Option<&mut f64> {
        Some(&mut self.betas.0)
    }

    fn slots(&self, _param: &Tensor) -> Vec<Slot> {
        vec![Slot::zeros("exp_avg")]
    }

    fn step(&self, step: &Step<'_>) -> Result<(), TorchError> {
        let grads = step.signed_grads(self.maximize)?;
        let averages = &step.slots[0];
        if self.weight_decay != 0.0 {
            foreach::mul_scalar_(step.params, 1.0 - step.lr * self.weight_decay)?;
        }
        let updates = foreach::lerp(averages, &grads, 1.0 - self.betas.0)?;
        foreach::sign_(&updates)?;
        foreach::add_(step.params, &updates, -step.lr)?;
        foreach::lerp_(averages, &grads, 1.0 - self.betas.1)
    }
}
