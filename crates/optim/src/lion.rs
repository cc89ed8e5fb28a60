//! Lion.

use overdrive_core::{OptimizerError, TorchError};
use tch::Tensor;

use crate::algorithm::{Algorithm, Field, Slot, Step, check_beta, check_not_negative};
use crate::builder::{GroupBuilder, Options};
use crate::foreach;
use crate::optimizer::GroupOptimizer;

/// Lion: steps by the sign of an average of gradients, with one number of state per parameter; lr 1e-4.
///
/// # Source
/// Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023.
pub type Lion = GroupOptimizer<LionOptions>;

/// The options of a [`Lion`].
pub type LionBuilder = GroupBuilder<LionOptions>;

/// The options of a [`Lion`] group, except the learning rate.
#[derive(Clone, Debug)]
pub struct LionOptions {
    betas: (f64, f64),
    weight_decay: f64,
    maximize: bool,
}

impl Default for LionOptions {
    fn default() -> Self {
        Self { betas: (0.9, 0.99), weight_decay: 0.0, maximize: false }
    }
}

impl<Scope> Options<LionOptions, Scope> {
    /// The weight of the average (against the new gradient) in the sign, and the average's decay rate, each in [0, 1);
    /// default (0.9, 0.99).
    pub fn betas(self, beta1: f64, beta2: f64) -> Self {
        self.with(move |options| options.betas = (beta1, beta2))
    }

    /// Decoupled weight decay: a step multiplies a parameter by 1 - lr * weight_decay; default 0.
    pub fn weight_decay(self, weight_decay: f64) -> Self {
        self.with(move |options| options.weight_decay = weight_decay)
    }

    /// Maximizes the objective instead of minimizing it; default false.
    pub fn maximize(self, maximize: bool) -> Self {
        self.with(move |options| options.maximize = maximize)
    }
}

impl Algorithm for LionOptions {
    const LR: f64 = 1e-4;
    const COUNTS_STEPS: bool = false;
    const ELEMENTWISE: bool = true;

    fn check(&self) -> Result<(), OptimizerError> {
        check_beta("beta1", self.betas.0)?;
        check_beta("beta2", self.betas.1)?;
        check_not_negative("weight_decay", self.weight_decay)
    }

    fn momentum(&mut self) -> Option<&mut f64> {
        Some(&mut self.betas.0)
    }

    fn fields(&mut self) -> Vec<(&'static str, Field<'_>)> {
        vec![
            ("betas.0", Field::Float(&mut self.betas.0)),
            ("betas.1", Field::Float(&mut self.betas.1)),
            ("weight_decay", Field::Float(&mut self.weight_decay)),
            ("maximize", Field::Bool(&mut self.maximize)),
        ]
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
