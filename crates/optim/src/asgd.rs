//! Averaged stochastic gradient descent.

use overdrive_core::{OptimizerError, TorchError};
use overdrive_ffi::{Arg, LazyOp};
use tch::Tensor;

use crate::algorithm::{Algorithm, Field, Slot, Step, check_not_negative, fill};
use crate::builder::{GroupBuilder, Options};
use crate::foreach::{self, Lent};
use crate::optimizer::GroupOptimizer;

static ADD: LazyOp = LazyOp::new("aten::add", "Scalar");
static MUL: LazyOp = LazyOp::new("aten::mul", "Scalar");
static POW: LazyOp = LazyOp::new("aten::pow", "Tensor_Scalar");

/// Averaged SGD; lr 1e-2. The average of each parameter is `ax` in the state.
///
/// # Source
/// `torch.optim.ASGD`; Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992.
#[doc(alias = "ASGD")]
pub type Asgd = GroupOptimizer<AsgdOptions>;

/// The options of an [`Asgd`].
pub type AsgdBuilder = GroupBuilder<AsgdOptions>;

/// The options of an [`Asgd`] group, except the learning rate.
#[derive(Clone, Debug)]
pub struct AsgdOptions {
    lambd: f64,
    alpha: f64,
    t0: f64,
    weight_decay: f64,
    maximize: bool,
}

impl Default for AsgdOptions {
    fn default() -> Self {
        Self { lambd: 1e-4, alpha: 0.75, t0: 1e6, weight_decay: 0.0, maximize: false }
    }
}

impl<Scope> Options<AsgdOptions, Scope> {
    /// The decay term: a step adds `lambd` times the parameter to the gradient, and makes later steps smaller; default
    /// 1e-4.
    pub fn lambd(self, lambd: f64) -> Self {
        self.with(move |options| options.lambd = lambd)
    }

    /// How fast steps become smaller: after step t the learning rate is divided by (1 + lambd * lr * t)^alpha; default
    /// 0.75.
    pub fn alpha(self, alpha: f64) -> Self {
        self.with(move |options| options.alpha = alpha)
    }

    /// The step at which averaging starts; default 1e6.
    pub fn t0(self, t0: f64) -> Self {
        self.with(move |options| options.t0 = t0)
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

impl Algorithm for AsgdOptions {
    const LR: f64 = 1e-2;
    const COUNTS_STEPS: bool = true;

    fn check(&self) -> Result<(), OptimizerError> {
        check_not_negative("lambd", self.lambd)?;
        check_not_negative("alpha", self.alpha)?;
        check_not_negative("t0", self.t0)?;
        check_not_negative("weight_decay", self.weight_decay)
    }

    fn fields(&mut self) -> Vec<(&'static str, Field<'_>)> {
        vec![
            ("lambd", Field::Float(&mut self.lambd)),
            ("alpha", Field::Float(&mut self.alpha)),
            ("t0", Field::Float(&mut self.t0)),
            ("weight_decay", Field::Float(&mut self.weight_decay)),
            ("maximize", Field::Bool(&mut self.maximize)),
        ]
    }

    fn slots(&self, _param: &Tensor) -> Vec<Slot> {
        vec![Slot::zeros("ax"), Slot::scalar("eta", 0.0), Slot::scalar("mu", 1.0)]
    }

    fn step(&self, step: &Step<'_>) -> Result<(), TorchError> {
        let (averages, etas, mus) = (&step.slots[0], &step.slots[1], &step.slots[2]);
        step.start(etas, step.lr)?;
        let directions = match step.penalised_grads(self.maximize, self.weight_decay)? {
            Lent::Given(grads) => foreach::add(grads, step.params, self.lambd)?,
            Lent::Made(grads) => {
                foreach::add_(&grads, step.params, self.lambd)?;
                grads
            }
        };
        foreach::addcmul_(step.params, &directions, etas, -1.0)?;
        drop(directions);
        foreach::addcmul_(averages, &foreach::sub(step.params, averages)?, mus, 1.0)?;
        // Of the next step.
        fill(etas, &self.etas(step)?)?;
        fill(mus, &step.by_count(|count| 1.0 / (count - self.t0).max(1.0))?)
    }
}

impl AsgdOptions {
    /// The next learning rate of each parameter, in float32 and by these operators, as PyTorch computes it.
    fn etas(&self, step: &Step<'_>) -> Result<Vec<f64>, TorchError> {
        let eta = |index| {
            let scaled = MUL.tensor(&[Arg::Tensor(&step.counts.get(index)?), Arg::Double(self.lambd * step.lr)])?;
            let sum = ADD.tensor(&[Arg::Tensor(&scaled), Arg::Double(1.0)])?;
            let divisor = POW.tensor(&[Arg::Tensor(&sum), Arg::Double(self.alpha)])?;
            let eta = MUL.tensor(&[Arg::Tensor(&divisor.f_reciprocal()?), Arg::Double(step.lr)])?;
            Ok::<_, TorchError>(eta.f_double_value(&[])?)
        };
        match step.same_counts {
            true => Ok(vec![eta(0)?; step.counts.len()]),
            false => (0..step.counts.len()).map(eta).collect(),
        }
    }
}
