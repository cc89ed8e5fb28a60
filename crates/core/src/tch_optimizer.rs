//! `tch::nn::Optimizer` under the workspace's contract.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tch::Tensor;

use crate::activity::{Activity, activity};
use crate::optimizer::{Optimizer, OptimizerError, OptimizerId};

/// tch unwraps libtorch's errors; here they come back as errors again.
fn caught(call: impl FnOnce()) -> Result<(), OptimizerError> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|payload| {
        let text = payload.downcast_ref::<String>().cloned();
        OptimizerError::Tch(
            text.or_else(|| payload.downcast_ref::<&str>().map(|s| (*s).to_owned())).unwrap_or_default(),
        )
    })
}

/// One group, because tch does not tell how many it has; [`lr`](Optimizer::lr) is none, because tch does not tell it.
/// [`set_lr`](Optimizer::set_lr) and [`set_momentum`](Optimizer::set_momentum) set every group's.
impl Optimizer for tch::nn::Optimizer {
    fn id(&self) -> OptimizerId {
        OptimizerId::of_first_parameter(&self.params())
    }

    fn params(&self) -> Vec<Tensor> {
        self.trainable_variables()
    }

    fn num_groups(&self) -> usize {
        1
    }

    fn lr(&self, _group: usize) -> Option<f64> {
        None
    }

    fn set_lr(&mut self, group: usize, lr: f64) -> Result<(), OptimizerError> {
        if group != 0 {
            return Err(OptimizerError::NoSuchGroup { group, groups: 1 });
        }
        OptimizerError::check_lr(lr)?;
        caught(|| tch::nn::Optimizer::set_lr(self, lr))
    }

    fn set_momentum(&mut self, group: usize, momentum: f64) -> Result<(), OptimizerError> {
        if group != 0 {
            return Err(OptimizerError::NoSuchGroup { group, groups: 1 });
        }
        OptimizerError::check_range("momentum", momentum, 0.0..1.0, "at least 0 and below 1")?;
        caught(|| tch::nn::Optimizer::set_momentum(self, momentum))
    }

    fn step(&mut self) -> Result<(), OptimizerError> {
        let _step = activity(|| Activity::OptimizerStep(&*self));
        caught(|| tch::nn::Optimizer::step(self))
    }

    fn zero_grad(&mut self) -> Result<(), OptimizerError> {
        caught(|| tch::nn::Optimizer::zero_grad(self))
    }
}
