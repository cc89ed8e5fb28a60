//! `tch::nn::Optimizer` as an [`Optimizer`].

use std::panic::{AssertUnwindSafe, catch_unwind};

use overdrive_ffi::TensorList;
use tch::Tensor;

use crate::activity::{Activity, activity};
use crate::marks::{check_averaged, check_not_stepped_in_backward};
use crate::optimizer::{Optimizer, OptimizerError, OptimizerId};

/// tch's own optimizer as an [`Optimizer`], for schedules, clipping, accumulation and a `GradScaler`.
///
/// It has one group and [`lr`](Optimizer::lr) returns `None`, because tch exposes neither the number of groups nor
/// their rates; [`set_lr`](Optimizer::set_lr) and [`set_momentum`](Optimizer::set_momentum) set all groups. Nor does
/// tch expose the optimizer's state, so this is not `Stateful`, and a checkpoint cannot take it:
///
/// ```compile_fail
/// # use overdrive_core::{Stateful, TchOptimizer};
/// fn save(state: &impl Stateful) {}
/// fn checkpoint(opt: &TchOptimizer) {
///     save(opt); // the trait bound `TchOptimizer: Stateful` is not satisfied
/// }
/// ```
///
/// ```
/// # use overdrive_core::{Optimizer, TchOptimizer};
/// # use tch::nn::OptimizerConfig;
/// # use tch::{Device, Kind, nn};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let vs = nn::VarStore::new(Device::Cpu);
/// # let weight = vs.root().ones("weight", &[2]);
/// let mut opt = TchOptimizer::new(nn::Sgd::default().build(&vs, 0.1)?);
/// weight.sum(Kind::Float).backward();
/// opt.step()?; // errors of libtorch are errors here, where tch panics
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct TchOptimizer {
    inner: tch::nn::Optimizer,
    id: OptimizerId,
}

impl TchOptimizer {
    /// Takes over an optimizer that tch has built.
    pub fn new(inner: tch::nn::Optimizer) -> Self {
        Self { inner, id: OptimizerId::new() }
    }

    /// tch's optimizer, for methods that only it has (`set_weight_decay`, `set_lr_group`).
    pub fn inner_mut(&mut self) -> &mut tch::nn::Optimizer {
        &mut self.inner
    }

    /// Gives tch's optimizer back.
    pub fn into_inner(self) -> tch::nn::Optimizer {
        self.inner
    }
}

/// tch unwraps libtorch's errors; this turns its panics back into errors.
fn caught(call: impl FnOnce()) -> Result<(), OptimizerError> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|payload| {
        let text = payload.downcast_ref::<String>().cloned();
        OptimizerError::Tch(
            text.or_else(|| payload.downcast_ref::<&str>().map(|s| (*s).to_owned())).unwrap_or_default(),
        )
    })
}

impl Optimizer for TchOptimizer {
    fn id(&self) -> OptimizerId {
        self.id
    }

    fn params(&self) -> Vec<Tensor> {
        self.inner.trainable_variables()
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
        caught(|| self.inner.set_lr(lr))
    }

    fn set_momentum(&mut self, group: usize, momentum: f64) -> Result<(), OptimizerError> {
        if group != 0 {
            return Err(OptimizerError::NoSuchGroup { group, groups: 1 });
        }
        OptimizerError::check_range("momentum", momentum, 0.0..1.0, "at least 0 and below 1")?;
        caught(|| self.inner.set_momentum(momentum))
    }

    fn step(&mut self) -> Result<(), OptimizerError> {
        let _step = activity(|| Activity::OptimizerStep(&*self));
        check_averaged(self)?;
        check_not_stepped_in_backward(self)?;
        caught(|| self.inner.step())
    }

    /// Frees the gradients. tch's own method writes zeros, and fails on gradients that are views of DDP's buckets.
    fn zero_grad(&mut self) -> Result<(), OptimizerError> {
        Ok(TensorList::new(&self.params())?.clear_grads()?)
    }
}
