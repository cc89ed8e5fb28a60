//! RMSprop.

use overdrive_core::{OptimizerError, TorchError};
use tch::Tensor;

use crate::algorithm::{Algorithm, Field, Slot, Step, check_not_negative};
use crate::builder::{GroupBuilder, Options};
use crate::foreach;
use crate::optimizer::GroupOptimizer;

/// RMSprop, centred or not, with momentum; lr 1e-2.
///
/// # Source
/// `torch.optim.RMSprop`; Hinton's lecture notes; Graves, "Generating Sequences With Recurrent Neural Networks", 2013.
#[doc(alias = "RMSprop")]
pub type RmsProp = GroupOptimizer<RmsPropOptions>;

/// The options of an [`RmsProp`].
pub type RmsPropBuilder = GroupBuilder<RmsPropOptions>;

/// The options of an [`RmsProp`] group, except the learning rate.
#[derive(Clone, Debug)]
pub struct RmsPropOptions {
    alpha: f64,
    eps: f64,
    weight_decay: f64,
    momentum: f64,
    centered: bool,
    maximize: bool,
}

impl Default for RmsPropOptions {
    fn default() -> Self {
        Self { alpha: 0.99, eps: 1e-8, weight_decay: 0.0, momentum: 0.0, centered: false, maximize: false }
    }
}

impl<Scope> Options<RmsPropOptions, Scope> {
    /// The decay rate of the average of squared gradients, in [0, 1); default 0.99.
    pub fn alpha(self, alpha: f64) -> Self {
        self.with(move |options| options.alpha = alpha)
    }

    /// Added to the denominator; default 1e-8.
    pub fn eps(self, eps: f64) -> Self {
        self.with(move |options| options.eps = eps)
    }

    /// The L2 penalty, added to the gradient; default 0.
    pub fn weight_decay(self, weight_decay: f64) -> Self {
        self.with(move |options| options.weight_decay = weight_decay)
    }

    /// The momentum factor; default 0.
    pub fn momentum(self, momentum: f64) -> Self {
        self.with(move |options| options.momentum = momentum)
    }

    /// Normalizes by the gradient's estimated variance instead of its mean square; default false.
    pub fn centered(self, centered: bool) -> Self {
        self.with(move |options| options.centered = centered)
    }

    /// Maximizes the objective instead of minimizing it; default false.
    pub fn maximize(self, maximize: bool) -> Self {
        self.with(move |options| options.maximize = maximize)
    }
}

impl Algorithm for RmsPropOptions {
    const LR: f64 = 1e-2;
    /// Only for the saved state: PyTorch's has `step`.
    const COUNTS_STEPS: bool = true;
    const ELEMENTWISE: bool = true;

    fn check(&self) -> Result<(), OptimizerError> {
        OptimizerError::check_range("alpha", self.alpha, 0.0..1.0, "at least 0 and below 1")?;
        check_not_negative("eps", self.eps)?;
        check_not_negative("weight_decay", self.weight_decay)?;
        check_not_negative("momentum", self.momentum)
    }

    fn momentum(&mut self) -> Option<&mut f64> {
        Some(&mut self.momentum)
    }

    fn fields(&mut self) -> Vec<(&'static str, Field<'_>)> {
        vec![
            ("alpha", Field::Float(&mut self.alpha)),
            ("eps", Field::Float(&mut self.eps)),
            ("weight_decay", Field::Float(&mut self.weight_decay)),
            ("momentum", Field::Float(&mut self.momentum)),
            ("centered", Field::Bool(&mut self.centered)),
            ("maximize", Field::Bool(&mut self.maximize)),
        ]
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
