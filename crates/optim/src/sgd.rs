//! SGD with momentum.

use overdrive_core::{OptimizerError, TorchError};
use overdrive_ffi::{Arg, LazyOp, TensorList};
use tch::{Device, Kind, Tensor};

use crate::algorithm::{Algorithm, Fusable, Slot, Step};
use crate::builder::GroupBuilder;
use crate::foreach::{self, Lent};
use crate::optimizer::GroupOptimizer;
use crate::options::{NOT_NEGATIVE, options};

static FUSED_SGD: LazyOp = LazyOp::new("aten::_fused_sgd_", "");

/// Stochastic gradient descent with momentum; lr 1e-3.
///
/// # Source
/// `torch.optim.SGD`
#[doc(alias = "SGD")]
pub type Sgd = GroupOptimizer<SgdOptions>;

/// The options of an [`Sgd`].
pub type SgdBuilder = GroupBuilder<SgdOptions>;

options! {
    /// The options of an [`Sgd`] group, except the learning rate.
    SgdOptions {
        /// The momentum factor; default 0.
        momentum: f64 = 0.0, NOT_NEGATIVE;
        /// The fraction of the gradient that is left out of the momentum; default 0. With both dampening and momentum,
        /// a `GradScaler` reads its flag on the host, as for optimizers without a fused kernel, and refuses float16
        /// gradients.
        dampening: f64 = 0.0, (f64::MIN..f64::INFINITY, "a finite number");
        /// The L2 penalty, added to the gradient; default 0.
        weight_decay: f64 = 0.0, NOT_NEGATIVE;
        /// Nesterov momentum, which needs a momentum and no dampening; default false.
        nesterov: bool = false;
        /// Maximizes the objective instead of minimizing it; default false.
        maximize: bool = false;
    }
}

impl Fusable for SgdOptions {}

impl Algorithm for SgdOptions {
    const LR: f64 = 1e-3;
    const COUNTS_STEPS: bool = false;
    const ELEMENTWISE: bool = true;

    fn check(&self) -> Result<(), OptimizerError> {
        if self.nesterov && self.momentum <= 0.0 {
            let (option, found) = ("momentum", self.momentum);
            return Err(OptimizerError::InvalidOption { option, found, expected: "above 0 with nesterov" });
        }
        if self.nesterov && self.dampening != 0.0 {
            let (option, found) = ("dampening", self.dampening);
            return Err(OptimizerError::InvalidOption { option, found, expected: "0 with nesterov" });
        }
        Ok(())
    }

    fn has_fused_kernel(device: Device, kind: Kind) -> bool {
        match device {
            // The kernel of libtorch 2.11 leaves most bfloat16 and float16 weights as they were.
            Device::Cpu => !matches!(kind, Kind::BFloat16 | Kind::Half),
            _ => matches!(device, Device::Cuda(_) | Device::Mps),
        }
    }

    fn momentum(&mut self) -> Option<&mut f64> {
        Some(&mut self.momentum)
    }

    /// With dampening, the first step differs from the others, and only the device knows whether it was skipped.
    fn takes_grad_scale(&self) -> bool {
        self.dampening == 0.0 || self.momentum == 0.0
    }

    fn slots(&self, _param: &Tensor) -> Vec<Slot> {
        // Zeros, not uninitialised memory as in PyTorch: if the first step is skipped for an infinity, the fused kernel
        // leaves the buffers unchanged, and the host cannot know that without waiting for the device.
        let slot = (self.momentum > 0.0).then(|| Slot::zeros("momentum_buffer"));
        slot.into_iter().collect()
    }

    fn step(&self, step: &Step<'_>) -> Result<(), TorchError> {
        let some = step.params.get(0)?;
        // The parameters' dtype may have been changed since the optimizer was built.
        let fused = step.fused && Self::has_fused_kernel(some.device(), some.kind());
        if step.fused && !fused && step.scale.is_some() {
            let why = "the parameters were converted to 16 bits after the optimizer was built, and it cannot step them with a \
                       scale: build it after the conversion";
            return Err(tch::TchError::Torch(why.to_owned()).into());
        }
        let one = |params: &TensorList, grads: &TensorList, buffers: Option<&TensorList>, first| match fused {
            true => self.fused((params, grads, buffers), first, step),
            false => self.foreach((params, grads, buffers), first, step),
        };
        let Some(buffers) = step.slots.first().filter(|_| self.momentum != 0.0) else {
            return one(step.params, step.grads, None, false);
        };
        let first = step.first[0];
        if step.first.iter().all(|other| *other == first) {
            return one(step.params, step.grads, Some(buffers), first);
        }
        // Some parameters have their first gradient only now: it is copied into their momentum, without dampening.
        for first in [true, false] {
            let keep: Vec<bool> = step.first.iter().map(|other| *other == first).collect();
            one(&step.params.select(&keep)?, &step.grads.select(&keep)?, Some(&buffers.select(&keep)?), first)?;
        }
        Ok(())
    }
}

/// Parameters, their gradients, and their momentum where there is one.
type Lists<'a> = (&'a TensorList, &'a TensorList, Option<&'a TensorList>);

impl SgdOptions {
    fn fused(&self, (params, grads, buffers): Lists<'_>, first: bool, step: &Step<'_>) -> Result<(), TorchError> {
        let none = TensorList::new::<Tensor>(&[])?;
        FUSED_SGD.call(&[
            Arg::TensorList(params),
            Arg::TensorList(grads),
            Arg::TensorList(buffers.unwrap_or(&none)),
            Arg::Double(self.weight_decay),
            Arg::Double(self.momentum),
            Arg::Double(step.lr),
            Arg::Double(self.dampening),
            Arg::Bool(self.nesterov),
            Arg::Bool(self.maximize),
            Arg::Bool(first),
            step.scale.and_then(|scale| scale.scale).into(),
            step.scale.map(|scale| scale.found_inf).into(),
        ])?;
        Ok(())
    }

    fn foreach(&self, (params, grads, buffers): Lists<'_>, first: bool, step: &Step<'_>) -> Result<(), TorchError> {
        let own = Step { params, grads, slots: &[], first: &[], ..*step };
        let grads = own.penalised_grads(self.maximize, self.weight_decay)?;
        let Some(buffers) = buffers else { return foreach::add_(params, &grads, -step.lr) };
        match first {
            true => foreach::copy_(buffers, &grads)?,
            false => {
                foreach::mul_scalar_(buffers, self.momentum)?;
                foreach::add_(buffers, &grads, 1.0 - self.dampening)?;
            }
        }
        match grads {
            _ if !self.nesterov => foreach::add_(params, buffers, -step.lr),
            Lent::Given(grads) => foreach::add_(params, &foreach::add(grads, buffers, self.momentum)?, -step.lr),
            Lent::Made(grads) => {
                foreach::add_(&grads, buffers, self.momentum)?;
                foreach::add_(params, &grads, -step.lr)
            }
        }
    }
}
