//! Clipping by the norm over all ranks' gradients.

use overdrive_core::OptimizerError;
use overdrive_ddp::{ProcessGroup, ReduceOp};
use overdrive_ffi::{Arg, LazyOp, upload};
use tch::{Device, Kind, Tensor};

use super::{PART, ShardedDataParallel};
use crate::error::ShardError;
use crate::link::Link;

static NORM: LazyOp = LazyOp::new("aten::linalg_vector_norm", "");
static ADD: LazyOp = LazyOp::new("aten::add", "Scalar");
static MUL: LazyOp = LazyOp::new("aten::mul", "Scalar");
static CLAMP_MAX: LazyOp = LazyOp::new("aten::clamp_max", "");

/// libtorch's numbers of float32 and float64.
const FLOAT: i64 = 6;
const DOUBLE: i64 = 7;

/// PyTorch's guard against a division by zero.
const EPS: f64 = 1e-6;

/// A norm of gradients over all ranks: dereferences to a scalar tensor on the device. It need not be read.
#[derive(Debug)]
pub struct GradNorm(Tensor);

impl std::ops::Deref for GradNorm {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.0
    }
}

impl ShardedDataParallel {
    /// Scales the averaged gradients of all ranks down so that their 2-norm, over all of them as one vector, is at most
    /// `max_norm`. Returns the norm before clipping, a scalar, the same on all ranks. Every rank calls it, with a
    /// `GradScaler` after `unscale_`.
    ///
    /// # Errors
    /// When `max_norm` is negative or NaN, or libtorch fails; [`ShardError::Ddp`] when a rank has exited or does not
    /// call it within the group's timeout.
    ///
    /// # Syncs
    /// Over Gloo, waits for all ranks; over NCCL, only the device does.
    ///
    /// # Source
    /// FairScale's `OSS.clip_grad_norm`
    pub fn clip_grad_norm_(&self, max_norm: f64) -> Result<GradNorm, ShardError> {
        check_max_norm(max_norm)?;
        self.link.check(PART)?;
        let grads = self.shared.lock().own()?;
        clip(&self.group, &self.link, grads, self.norm, max_norm)
    }
}

pub(crate) fn check_max_norm(max_norm: f64) -> Result<(), ShardError> {
    if max_norm.is_nan() || max_norm < 0.0 {
        let (option, found) = ("max_norm", max_norm);
        return Err(OptimizerError::InvalidOption { option, found, expected: "at least 0" }.into());
    }
    Ok(())
}

/// Clips this rank's gradients by the norm over all ranks, computed in this dtype on this device.
pub(crate) fn clip(
    group: &ProcessGroup,
    link: &Link,
    grads: Vec<Tensor>,
    (kind, device): (Kind, Device),
    max_norm: f64,
) -> Result<GradNorm, ShardError> {
    let _no_grad = tch::no_grad_guard();
    let dtype = Arg::Int(if kind == Kind::Double { DOUBLE } else { FLOAT });
    // Gradients may be kept on the host: one copy in each direction then, not one for each.
    let home = grads.first().map_or(device, Tensor::device);
    let mut squares = Tensor::f_zeros([1], (kind, home))?;
    for grad in &grads {
        // 16 bits cannot hold every norm of 16-bit gradients.
        let norm = NORM.tensor(&[Arg::Tensor(grad), Arg::Double(2.0), Arg::None, Arg::Bool(false), dtype])?;
        let _sum = squares.f_add_(&norm.f_to_device(home)?.f_square()?)?;
    }
    let mut squares = if home == device { squares } else { upload(&squares.f_to_device(Device::Cpu)?, device)? };
    if group.size() > 1 {
        link.watch(group.all_reduce(&mut squares, ReduceOp::Sum).map_err(ShardError::from))?;
    }
    let norm = squares.f_reshape(&[0i64; 0][..])?.f_sqrt()?;
    let inverse = ADD.tensor(&[Arg::Tensor(&norm), Arg::Double(EPS)])?.f_reciprocal()?;
    let factor = MUL.tensor(&[Arg::Tensor(&inverse), Arg::Double(max_norm)])?;
    // Never above 1: gradients that are small enough stay as they are.
    let factor = CLAMP_MAX.tensor(&[Arg::Tensor(&factor), Arg::Double(1.0)])?;
    let factor = factor.f_to_device(home)?;
    for mut grad in grads {
        let factor = factor.f_to_device(grad.device())?;
        let _scaled = grad.f_mul_(&factor)?;
    }
    Ok(GradNorm(norm))
}
