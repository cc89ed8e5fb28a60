//! Adagrad.

use overdrive_core::TorchError;
use overdrive_ffi::{Arg, LazyOp};
use tch::{Device, Kind, Tensor};

use crate::algorithm::{Algorithm, Fusable, Slot, Step};
use crate::builder::GroupBuilder;
use crate::foreach::{self, Lent};
use crate::optimizer::GroupOptimizer;
use crate::options::{NOT_NEGATIVE, options};

static FUSED_ADAGRAD: LazyOp = LazyOp::new("aten::_fused_adagrad_", "");

/// Adagrad; lr 1e-2.
///
/// # Source
/// `torch.optim.Adagrad`; Duchi, Hazan and Singer, "Adaptive Subgradient Methods", 2011.
pub type Adagrad = GroupOptimizer<AdagradOptions>;

/// The options of an [`Adagrad`].
pub type AdagradBuilder = GroupBuilder<AdagradOptions>;

options! {
    /// The options of an [`Adagrad`] group, except the learning rate.
    AdagradOptions {
        /// How fast the learning rate falls: it is divided by 1 + (steps - 1) * lr_decay, with the parameter's own step
        /// count; default 0.
        lr_decay: f64 = 0.0, NOT_NEGATIVE;
        /// The L2 penalty, added to the gradient; default 0.
        weight_decay: f64 = 0.0, NOT_NEGATIVE;
        /// The initial value of the sums of squares; default 0.
        initial_accumulator_value: f64 = 0.0, NOT_NEGATIVE;
        /// Added to the denominator; default 1e-10.
        eps: f64 = 1e-10, NOT_NEGATIVE;
        /// Maximizes the objective instead of minimizing it; default false.
        maximize: bool = false;
    }
}

impl Fusable for AdagradOptions {}

impl Algorithm for AdagradOptions {
    const LR: f64 = 1e-2;
    const COUNTS_STEPS: bool = true;
    const ELEMENTWISE: bool = true;

    fn has_fused_kernel(device: Device, _kind: Kind) -> bool {
        device == Device::Cpu
    }

    fn slots(&self, _param: &Tensor) -> Vec<Slot> {
        vec![Slot::filled("sum", self.initial_accumulator_value)]
    }

    fn step(&self, step: &Step<'_>) -> Result<(), TorchError> {
        match step.fused {
            true => self.fused(step),
            false => self.foreach(step),
        }
    }
}

impl AdagradOptions {
    fn fused(&self, step: &Step<'_>) -> Result<(), TorchError> {
        FUSED_ADAGRAD.call(&[
            Arg::TensorList(step.params),
            Arg::TensorList(step.grads),
            Arg::TensorList(&step.slots[0]),
            Arg::TensorList(step.counts),
            Arg::Double(step.lr),
            Arg::Double(self.lr_decay),
            Arg::Double(self.weight_decay),
            Arg::Double(self.eps),
            Arg::Bool(self.maximize),
            step.scale.and_then(|scale| scale.scale).into(),
            step.scale.map(|scale| scale.found_inf).into(),
        ])?;
        Ok(())
    }

    fn foreach(&self, step: &Step<'_>) -> Result<(), TorchError> {
        let grads = step.penalised_grads(self.maximize, self.weight_decay)?;
        let rates = step.by_count(|count| -step.lr / (1.0 + (count - 1.0) * self.lr_decay))?;
        let sums = &step.slots[0];
        foreach::addcmul_(sums, &grads, &grads, 1.0)?;
        let denominators = foreach::sqrt(sums)?;
        foreach::add_scalar_(&denominators, self.eps)?;
        let numerators = match grads {
            Lent::Given(grads) => foreach::mul_each(grads, &rates)?,
            Lent::Made(grads) => {
                foreach::mul_each_(&grads, &rates)?;
                grads
            }
        };
        foreach::addcdiv_(step.params, &numerators, &denominators, 1.0)
    }
}
