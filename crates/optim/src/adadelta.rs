//! Adadelta.

use overdrive_core::{OptimizerError, TorchError};
use tch::Tensor;

use crate::algorithm::{Algorithm, Field, Slot, Step, check_not_negative};
use crate::builder::{GroupBuilder, Options};
use crate::foreach;
use crate::optimizer::GroupOptimizer;

/// Adadelta; lr 1.
///
/// # Source
/// `torch.optim.Adadelta`; Zeiler, "ADADELTA: An Adaptive Learning Rate Method", 2012.
pub type Adadelta = GroupOptimizer<AdadeltaOptions>;

/// The options of an [`Adadelta`].
pub type AdadeltaBuilder = GroupBuilder<AdadeltaOptions>;

/// The options of an [`Adadelta`] group, except the learning rate.
#[derive(Clone, Debug)]
pub struct AdadeltaOptions {
    rho: f64,
    eps: f64,
    weight_decay: f64,
    maximize: bool,
}

impl Default for AdadeltaOptions {
    fn default() -> Self {
        Self { rho: 0.9, eps: 1e-6, weight_decay: 0.0, maximize: false }
    }
}

impl<Scope> Options<AdadeltaOptions, Scope> {
    /// The decay rate of the averages of squared gradients and squared updates, in [0, 1]; default 0.9.
    pub fn rho(self, rho: f64) -> Self {
        self.with(move |options| options.rho = rho)
    }

    /// Added to both averages before their roots are taken; default 1e-6.
    pub fn eps(self, eps: f64) -> Self {
        self.with(move |options| options.eps = eps)
    }

    /// The L2 penalty, added to the gradient; default 0.
    pub fn weight_decay(self, weight_decay: f64) -> Self {
        self.with(move |options| options.weight_decay = weight_decay)
    }

    /// Maximizes the objective instead of minimizing it; default false.
    pub fn maximize(self, maximize: bool) -> Self {
        self.with(move |options| options.maximize = maximize)
    }
}

impl Algorithm for AdadeltaOptions {
    const LR: f64 = 1.0;
    /// Only for the saved state: PyTorch's has `step`.
    const COUNTS_STEPS: bool = true;
    const ELEMENTWISE: bool = true;

    fn check(&self) -> Result<(), OptimizerError> {
        OptimizerError::check_range("rho", self.rho, 0.0..1f64.next_up(), "at least 0 and at most 1")?;
        check_not_negative("eps", self.eps)?;
        check_not_negative("weight_decay", self.weight_decay)
    }

    fn fields(&mut self) -> Vec<(&'static str, Field<'_>)> {
        vec![
            ("rho", Field::Float(&mut self.rho)),
            ("eps", Field::Float(&mut self.eps)),
            ("weight_decay", Field::Float(&mut self.weight_decay)),
            ("maximize", Field::Bool(&mut self.maximize)),
        ]
    }

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
