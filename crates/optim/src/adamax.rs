//! Adamax.

use overdrive_core::{OptimizerError, TorchError};
use tch::Tensor;

use crate::algorithm::{Algorithm, Field, Slot, Step, check_beta, check_not_negative};
use crate::builder::{GroupBuilder, Options};
use crate::foreach::{self, Lent};
use crate::optimizer::GroupOptimizer;

/// Adamax, the form of Adam that divides by the largest recent gradient; lr 2e-3.
///
/// # Source
/// `torch.optim.Adamax`; Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2014.
pub type Adamax = GroupOptimizer<AdamaxOptions>;

/// The options of an [`Adamax`].
pub type AdamaxBuilder = GroupBuilder<AdamaxOptions>;

/// The options of an [`Adamax`] group, except the learning rate.
#[derive(Clone, Debug)]
pub struct AdamaxOptions {
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
    maximize: bool,
}

impl Default for AdamaxOptions {
    fn default() -> Self {
        Self { betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.0, maximize: false }
    }
}

impl<Scope> Options<AdamaxOptions, Scope> {
    /// The decay rates of the average of gradients and of their largest size, each in [0, 1); default (0.9, 0.999).
    pub fn betas(self, beta1: f64, beta2: f64) -> Self {
        self.with(move |options| options.betas = (beta1, beta2))
    }

    /// Added to the gradient's size; default 1e-8.
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

impl Algorithm for AdamaxOptions {
    const LR: f64 = 2e-3;
    const COUNTS_STEPS: bool = true;
    const ELEMENTWISE: bool = true;

    fn check(&self) -> Result<(), OptimizerError> {
        check_beta("beta1", self.betas.0)?;
        check_beta("beta2", self.betas.1)?;
        check_not_negative("eps", self.eps)?;
        check_not_negative("weight_decay", self.weight_decay)
    }

    fn momentum(&mut self) -> Option<&mut f64> {
        Some(&mut self.betas.0)
    }

    fn fields(&mut self) -> Vec<(&'static str, Field<'_>)> {
        vec![
            ("betas.0", Field::Float(&mut self.betas.0)),
            ("betas.1", Field::Float(&mut self.betas.1)),
            ("eps", Field::Float(&mut self.eps)),
            ("weight_decay", Field::Float(&mut self.weight_decay)),
            ("maximize", Field::Bool(&mut self.maximize)),
        ]
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
