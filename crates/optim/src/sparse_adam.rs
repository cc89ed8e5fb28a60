//! Adam for sparse gradients.

use overdrive_core::TorchError;
use overdrive_ffi::{Arg, LazyOp};
use tch::Tensor;

use crate::algorithm::{Algorithm, Slot, Step};
use crate::builder::GroupBuilder;
use crate::optimizer::GroupOptimizer;
use crate::options::{BETA, options};

static ADD: LazyOp = LazyOp::new("aten::add_", "Scalar");
static MUL: LazyOp = LazyOp::new("aten::mul_", "Scalar");

/// Adam for parameters whose gradients are sparse, such as an embedding's with `sparse: true`: a step reads and writes
/// only the rows that the gradient has, and the averages of other rows do not decay. The default learning rate is 1e-3.
///
/// A dense gradient is an error. Give dense parameters to another optimizer; [`Joint`](crate::Joint) combines the two.
///
/// # Source
/// `torch.optim.SparseAdam`
pub type SparseAdam = GroupOptimizer<SparseAdamOptions>;

/// Builds a [`SparseAdam`].
pub type SparseAdamBuilder = GroupBuilder<SparseAdamOptions>;

options! {
    /// The options of a [`SparseAdam`] group, except the learning rate.
    SparseAdamOptions {
        /// The decay rates of the running averages of the gradient and its square, each in [0, 1); default (0.9,
        /// 0.999).
        betas(beta1: f64, beta2: f64) = (0.9, 0.999), BETA;
        /// Added to the denominator, above 0; default 1e-8.
        eps: f64 = 1e-8, (f64::MIN_POSITIVE..f64::INFINITY, "a finite number above 0");
        /// Maximizes the objective instead of minimizing it; default false.
        maximize: bool = false;
    }
}

impl Algorithm for SparseAdamOptions {
    const LR: f64 = 1e-3;
    const COUNTS_STEPS: bool = true;
    const SPARSE: bool = true;

    fn momentum(&mut self) -> Option<&mut f64> {
        Some(&mut self.betas.0)
    }

    fn slots(&self, _param: &Tensor) -> Vec<Slot> {
        vec![Slot::zeros("exp_avg"), Slot::zeros("exp_avg_sq")]
    }

    fn step(&self, step: &Step<'_>) -> Result<(), TorchError> {
        let (beta1, beta2) = self.betas;
        let step_sizes =
            step.by_count(|count| step.lr * (1.0 - beta2.powf(count)).sqrt() / (1.0 - beta1.powf(count)))?;
        for (index, step_size) in step_sizes.into_iter().enumerate() {
            // Sums the gradients of a row that occurs several times. Adam squares the gradient, so that a step with the
            // sum differs from one step for each.
            let grad = step.grads.get(index)?.f_coalesce()?;
            let (indices, values) = (grad.f_indices()?, grad.f_values()?);
            if values.numel() == 0 {
                continue;
            }
            let values = if self.maximize { values.f_neg()? } else { values };
            let indices: Vec<_> = indices.f_unbind(0)?.into_iter().map(Some).collect();
            let [exp_avg, exp_avg_sq] = [&step.slots[0], &step.slots[1]];
            let average = update_average(&exp_avg.get(index)?, &indices, &values, 1.0 - beta1)?;
            let square = update_average(&exp_avg_sq.get(index)?, &indices, &values.f_square()?, 1.0 - beta2)?;
            let root = square.f_sqrt()?;
            ADD.call(&[Arg::Tensor(&root), Arg::Double(self.eps)])?;
            let update = average.f_div(&root)?;
            MUL.call(&[Arg::Tensor(&update), Arg::Double(-step_size)])?;
            let mut param = step.params.get(index)?;
            let stepped = param.f_index(&indices)?.f_add(&update)?;
            let _ = param.f_index_put_(&indices, &stepped, false)?;
        }
        Ok(())
    }
}

/// Moves the moving averages at `indices` towards `values` by `weight`, and returns them.
fn update_average(
    averages: &Tensor,
    indices: &[Option<Tensor>],
    values: &Tensor,
    weight: f64,
) -> Result<Tensor, TorchError> {
    let old = averages.f_index(indices)?;
    let change = values.f_sub(&old)?;
    MUL.call(&[Arg::Tensor(&change), Arg::Double(weight)])?;
    let new = change.f_add(&old)?;
    let _ = averages.shallow_clone().f_index_put_(indices, &new, false)?;
    Ok(new)
}
