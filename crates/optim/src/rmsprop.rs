//! RMSprop.

use overdrive_core::TorchError;
use tch::Tensor;

use crate::algorithm::{Algorithm, Slot, Step};
use crate::builder::GroupBuilder;
use crate::foreach;
use crate::optimizer::GroupOptimizer;
use crate::options::{BETA, NOT_NEGATIVE, options};

/// RMSprop, centred or not, with momentum; lr 1e-2.
///
/// # Source
/// `torch.optim.RMSprop`; Hinton's lecture notes; Graves, "Generating Sequences With Recurrent Neural Networks", 2013.
#[doc(alias = "RMSprop")]
pub type RmsProp = GroupOptimizer<RmsPropOptions>;

/// The options of an [`RmsProp`].
pub type RmsPropBuilder = GroupBuilder<RmsPropOptions>;

options! {
    /// The options of an [`RmsProp`] group, except the learning rate.
    RmsPropOptions {
        /// The decay rate of the average of squared gradients, in [0, 1); default 0.99.
        alpha: f64 = 0.99, BETA;
        /// Added to the denominator; default 1e-8.
        eps: f64 = 1e-8, NOT_NEGATIVE;
        /// The L2 penalty, added to the gradient; default 0.
        weight_decay: f64 = 0.0, NOT_NEGATIVE;
        /// The momentum factor; default 0.
        momentum: f64 = 0.0, NOT_NEGATIVE;
        /// Normalizes by the gradient's estimated variance instead of its mean square; default false.
        centered: bool = false;
        /// Maximizes the objective instead of minimizing it; default false.
        maximize: bool = false;
    }
}

impl Algorithm for RmsPropOptions {
    const LR: f64 = 1e-2;
    /// The steps do not depend on the count; it is kept because PyTorch's saved state has `step`.
    const COUNTS_STEPS: bool = true;
    const ELEMENTWISE: bool = true;

    fn momentum(&mut self) -> Option<&mut f64> {
        Some(&mut self.momentum)
    }

    fn slots(&self, _param: &Tensor) -> Vec<Slot> {
        let mut names = vec!["square_avg"];
        if self.momentum > 0.0 {
            names.push("momentum_buffer");
        }
        if self.centered {
            names.push("grad_avg");
        }
        names.into_iter().map(Slot::zeros).collect()
    }

    fn step(&self, step: &Step<'_>) -> Result<(), TorchError> {
        let grads = step.penalised_grads(self.maximize, self.weight_decay)?;
        let square_avgs = &step.slots[0];
        foreach::mul_scalar_(square_avgs, self.alpha)?;
        foreach::addcmul_(square_avgs, &grads, &grads, 1.0 - self.alpha)?;
        let denominators = match step.slots.last().filter(|_| self.centered) {
            Some(grad_avgs) => {
                foreach::lerp_(grad_avgs, &grads, 1.0 - self.alpha)?;
                let variances = foreach::addcmul(square_avgs, grad_avgs, grad_avgs, -1.0)?;
                foreach::sqrt_(&variances)?;
                variances
            }
            None => foreach::sqrt(square_avgs)?,
        };
        foreach::add_scalar_(&denominators, self.eps)?;
        // At a momentum of 0 (a schedule may bring it there) the buffer stays unchanged, as in PyTorch.
        if self.momentum <= 0.0 {
            return foreach::addcdiv_(step.params, &grads, &denominators, -step.lr);
        }
        let buffers = &step.slots[1];
        foreach::mul_scalar_(buffers, self.momentum)?;
        foreach::addcdiv_(buffers, &grads, &denominators, 1.0)?;
        foreach::add_(step.params, buffers, -step.lr)
    }
}
