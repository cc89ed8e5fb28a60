//! Rprop.

use overdrive_core::{OptimizerError, TorchError};
use overdrive_ffi::{Arg, LazyOp};
use tch::Tensor;

use crate::algorithm::{Algorithm, Slot, Step, check_not_negative};
use crate::builder::GroupBuilder;
use crate::foreach;
use crate::optimizer::GroupOptimizer;
use crate::options::options;

static EQUAL: LazyOp = LazyOp::new("aten::eq", "Scalar");
static MASKED_FILL: LazyOp = LazyOp::new("aten::masked_fill_", "Scalar");

/// Rprop: steps by the gradient's sign; each element's step grows while the sign stays and shrinks when it changes. For
/// full batches. lr 1e-2, which is the first step: later changes of the learning rate have no effect.
///
/// # Source
/// `torch.optim.Rprop`; Riedmiller and Braun, "A Direct Adaptive Method for Faster Backpropagation Learning", 1993.
pub type Rprop = GroupOptimizer<RpropOptions>;

/// The options of an [`Rprop`].
pub type RpropBuilder = GroupBuilder<RpropOptions>;

options! {
    /// The options of an [`Rprop`] group, except the learning rate.
    RpropOptions {
        /// The factors by which a step shrinks (above 0, below 1) and grows (above 1); default (0.5, 1.2).
        etas(minus: f64, plus: f64) = (0.5, 1.2);
        /// The smallest and the largest step; default (1e-6, 50).
        step_sizes(smallest: f64, largest: f64) = (1e-6, 50.0);
        /// Maximizes the objective instead of minimizing it; default false.
        maximize: bool = false;
    }
}

impl Algorithm for RpropOptions {
    const LR: f64 = 1e-2;
    /// The steps do not depend on the count; it is kept because PyTorch's saved state has `step`.
    const COUNTS_STEPS: bool = true;
    const ELEMENTWISE: bool = true;

    fn check(&self) -> Result<(), OptimizerError> {
        let above = |low: f64| low.next_up();
        OptimizerError::check_range("etaminus", self.etas.0, above(0.0)..1.0, "above 0 and below 1")?;
        OptimizerError::check_range("etaplus", self.etas.1, above(1.0)..f64::INFINITY, "a finite number above 1")?;
        let (smallest, largest) = self.step_sizes;
        check_not_negative("step_size_min", smallest)?;
        OptimizerError::check_range(
            "step_size_max",
            largest,
            smallest..f64::INFINITY,
            "finite and at least the minimum",
        )
    }

    fn slots(&self, _param: &Tensor) -> Vec<Slot> {
        vec![Slot::zeros("prev"), Slot::zeros("step_size")]
    }

    fn step(&self, step: &Step<'_>) -> Result<(), TorchError> {
        let (prevs, step_sizes) = (&step.slots[0], &step.slots[1]);
        step.start(step_sizes, step.lr)?;
        // 1 where the sign has stayed, -1 where it has changed, 0 where a gradient is 0.
        let changes = foreach::mul(step.grads, prevs)?;
        foreach::copy_(prevs, step.grads)?;
        if self.maximize {
            foreach::neg_(&changes)?;
            foreach::neg_(prevs)?;
        }
        foreach::sign_(&changes)?;
        let fill = |target: &Tensor, tested: &Tensor, value: f64, with: f64| {
            let mask = EQUAL.tensor(&[Arg::Tensor(tested), Arg::Double(value)])?;
            MASKED_FILL.call(&[Arg::Tensor(target), Arg::Tensor(&mask), Arg::Double(with)]).map(drop)
        };
        let (minus, plus) = self.etas;
        let factors = changes;
        for factor in factors.to_vec()? {
            fill(&factor, &factor, 1.0, plus)?;
            fill(&factor, &factor, -1.0, minus)?;
            fill(&factor, &factor, 0.0, 1.0)?;
        }
        foreach::mul_(step_sizes, &factors)?;
        foreach::clamp_min_(step_sizes, self.step_sizes.0)?;
        foreach::clamp_max_(step_sizes, self.step_sizes.1)?;
        // After a change of sign, an element waits for a step.
        for (factor, prev) in factors.to_vec()?.iter().zip(prevs.to_vec()?) {
            fill(&prev, factor, minus, 0.0)?;
        }
        foreach::addcmul_(step.params, &foreach::sign(prevs)?, step_sizes, -1.0)
    }
}
