//! Adadelta.

use overdrive_core::TorchError;
use tch::Tensor;

use crate::algorithm::{Algorithm, Slot, Step};
use crate::builder::GroupBuilder;
use crate::foreach;
use crate::optimizer::GroupOptimizer;
use crate::options::{NOT_NEGATIVE, options};

/// Adadelta; lr 1.
///
/// # Source
/// `torch.optim.Adadelta`; Zeiler, "ADADELTA: An Adaptive Learning Rate Method", 2012.
pub type Adadelta = GroupOptimizer<AdadeltaOptions>;

/// The options of an [`Adadelta`].
pub type AdadeltaBuilder = GroupBuilder<AdadeltaOptions>;

options! {
    /// The options of an [`Adadelta`] group, except the learning rate.
    AdadeltaOptions {
        /// The decay rate of the averages of squared gradients and squared updates, in [0, 1]; default 0.9.
        rho: f64 = 0.9, (0.0..1f64.next_up(), "at least 0 and at most 1");
        /// Added to both averages before their roots are taken; default 1e-6.
        eps: f64 = 1e-6, NOT_NEGATIVE;
        /// The L2 penalty, added to the gradient; default 0.
        weight_decay: f64 = 0.0, NOT_NEGATIVE;
        /// Maximizes the objective instead of minimizing it; default false.
        maximize: bool = false;
    }
}

impl Algorithm for AdadeltaOptions {
    const LR: f64 = 1.0;
    /// The steps do not depend on the count; it is kept because PyTorch's saved state has `step`.
    const COUNTS_STEPS: bool = true;
    const ELEMENTWISE: bool = true;

    fn slots(&self, _param: &Tensor) -> Vec<Slot> {
        vec![Slot::zeros("square_avg"), Slot::zeros("acc_delta")]
    }

    fn step(&self, step: &Step<'_>) -> Result<(), TorchError> {
        let grads = step.penalised_grads(self.maximize, self.weight_decay)?;
        let (square_avgs, acc_deltas) = (&step.slots[0], &step.slots[1]);
        foreach::mul_scalar_(square_avgs, self.rho)?;
        foreach::addcmul_(square_avgs, &grads, &grads, 1.0 - self.rho)?;
        let denominators = foreach::add_scalar(square_avgs, self.eps)?;
        foreach::sqrt_(&denominators)?;
        let deltas = foreach::add_scalar(acc_deltas, self.eps)?;
        foreach::sqrt_(&deltas)?;
        foreach::div_(&deltas, &denominators)?;
        foreach::mul_(&deltas, &grads)?;
        foreach::mul_scalar_(acc_deltas, self.rho)?;
        foreach::addcmul_(acc_deltas, &deltas, &deltas, 1.0 - self.rho)?;
        foreach::add_(step.params, &deltas, -step.lr)
    }
}
