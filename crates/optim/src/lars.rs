//! LARS.

use overdrive_core::{OptimizerError, TorchError};
use overdrive_ffi::{Arg, LazyOp};
use tch::Tensor;

use crate::algorithm::{Algorithm, Field, Slot, Step, check_not_negative};
use crate::builder::GroupBuilder;
use crate::foreach::{self, Lent};
use crate::optimizer::GroupOptimizer;
use crate::trust::{as_list, norms, or_one};

static MUL: LazyOp = LazyOp::new("aten::mul", "Scalar");

/// LARS: SGD with momentum whose learning rate (1 when not said) is scaled for each parameter by the ratio of its length to
/// its gradient's, for large batches.
///
/// # Source
/// You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks", 2017, algorithm 1.
#[doc(alias = "LARS")]
pub type Lars = GroupOptimizer<LarsOptions>;

/// The options of a [`Lars`].
pub type LarsBuilder = GroupBuilder<LarsOptions>;

/// What tells one [`Lars`] from another.
#[derive(Clone, Debug)]
pub struct LarsOptions {
    momentum: f64,
    weight_decay: f64,
    trust_coefficient: f64,
    adaptive: bool,
    maximize: bool,
}

impl Default for LarsOptions {
    fn default() -> Self {
        Self { momentum: 0.9, weight_decay: 5e-4, trust_coefficient: 1e-3, adaptive: true, maximize: false }
    }
}

impl GroupBuilder<LarsOptions> {
    /// How much of the last step goes into the next, in [0, 1); 0.9 when not said.
    pub fn momentum(self, momentum: f64) -> Self {
        self.with(|options| options.momentum = momentum)
    }

    /// The L2 penalty, added to the gradient; 5e-4 when not said.
    pub fn weight_decay(self, weight_decay: f64) -> Self {
        self.with(|options| options.weight_decay = weight_decay)
    }

    /// How far a parameter may move, as a share of its length, at a learning rate of 1; 1e-3 when not said.
    pub fn trust_coefficient(self, coefficient: f64) -> Self {
        self.with(|options| options.trust_coefficient = coefficient)
    }

    /// Whether the learning rate is scaled for each parameter; on when not said. Groups of biases and gains often go
    /// without.
    pub fn adaptive(self, adaptive: bool) -> Self {
        self.with(|options| options.adaptive = adaptive)
    }

    /// Climbs where it would descend; off when not said.
    pub fn maximize(self, maximize: bool) -> Self {
        self.with(|options| options.maximize = maximize)
    }
}

impl Algorithm for LarsOptions {
    const LR: f64 = 1.0;
    const COUNTS_STEPS: bool = false;

    fn check(&self) -> Result<(), OptimizerError> {
        OptimizerError::check_range("momentum", self.momentum, 0.0..1.0, "at least 0 and below 1")?;
        check_not_negative("weight_decay", self.weight_decay)?;
        check_not_negative("trust_coefficient", self.trust_coefficient)
    }

    fn momentum(&mut self) -> Option<&mut f64> {
        Some(&mut self.momentum)
    }

    fn fields(&mut self) -> Vec<(&'static str, Field<'_>)> {
        vec![
            ("momentum", Field::Float(&mut self.momentum)),
            ("weight_decay", Field::Float(&mut self.weight_decay)),
            ("trust_coefficient", Field::Float(&mut self.trust_coefficient)),
            ("adaptive", Field::Bool(&mut self.adaptive)),
            ("maximize", Field::Bool(&mut self.maximize)),
        ]
    }

    fn slots(&self, _param: &Tensor) -> Vec<Slot> {
        vec![Slot::zeros("momentum_buffer")]
    }

    fn step(&self, step: &Step<'_>) -> Result<(), TorchError> {
        let scaled = |tensor: &Tensor, factor| MUL.tensor(&[Arg::Tensor(tensor), Arg::Double(factor)]);
        let ratios = match self.adaptive {
            true => {
                let (params, grads) = (norms(step.params)?, norms(step.grads)?);
                let lengths = grads.f_add(&scaled(&params, self.weight_decay)?)?;
                let ratios = scaled(&params, self.trust_coefficient)?.f_div(&lengths)?;
                Some(as_list(&scaled(&or_one(&ratios, &params, &grads)?, step.lr)?)?)
            }
            false => None,
        };
        let updates = match step.penalised_grads(self.maximize, self.weight_decay)? {
            Lent::Given(grads) => foreach::mul_each(grads, &vec![1.0; grads.len()])?,
            Lent::Made(grads) => grads,
        };
        match &ratios {
            Some(ratios) => foreach::mul_(&updates, ratios)?,
            None => foreach::mul_scalar_(&updates, step.lr)?,
        }
        let buffers = &step.slots[0];
        foreach::mul_scalar_(buffers, self.momentum)?;
        foreach::add_(buffers, &updates, 1.0)?;
        foreach::add_(step.params, buffers, -1.0)
    }
}
