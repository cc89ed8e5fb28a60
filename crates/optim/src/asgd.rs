//! Averaged stochastic gradient descent.

use overdrive_core::TorchError;
use overdrive_ffi::{Arg, LazyOp};
use tch::Tensor;

use crate::algorithm::{Algorithm, Slot, Step, fill};
use crate::builder::GroupBuilder;
use crate::foreach::{self, Lent};
use crate::optimizer::GroupOptimizer;
use crate::options::{NOT_NEGATIVE, options};

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

options! {
    /// The options of an [`Asgd`] group, except the learning rate.
    AsgdOptions {
        /// The decay term: a step adds `lambd` times the parameter to the gradient, and makes later steps smaller;
        /// default 1e-4.
        lambd: f64 = 1e-4, NOT_NEGATIVE;
        /// How fast steps become smaller: after step t the learning rate is divided by (1 + lambd * lr * t)^alpha;
        /// default 0.75.
        alpha: f64 = 0.75, NOT_NEGATIVE;
        /// The step at which averaging starts; default 1e6.
        t0: f64 = 1e6, NOT_NEGATIVE;
        /// The L2 penalty, added to the gradient; default 0.
        weight_decay: f64 = 0.0, NOT_NEGATIVE;
        /// Maximizes the objective instead of minimizing it; default false.
        maximize: bool = false;
    }
}

impl Algorithm for AsgdOptions {
    const LR: f64 = 1e-2;
    const COUNTS_STEPS: bool = true;

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
        // The learning rates and averaging weights of the next step.
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
