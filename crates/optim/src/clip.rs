//! Clipping of gradients by their norm, without waiting for the device.

use overdrive_core::{OptimizerError, TorchError};
use overdrive_ffi::{Arg, LazyOp, TensorList, Value};
use tch::{Device, Kind, Tensor};

static FOREACH_NORM: LazyOp = LazyOp::new("aten::_foreach_norm", "Scalar");
static FOREACH_MUL: LazyOp = LazyOp::new("aten::_foreach_mul_", "Tensor");
static ADD: LazyOp = LazyOp::new("aten::add", "Scalar");
static MUL: LazyOp = LazyOp::new("aten::mul", "Scalar");
static CLAMP_MAX: LazyOp = LazyOp::new("aten::clamp_max", "");

/// PyTorch's guard against a division by zero.
const EPS: f64 = 1e-6;

/// A norm of gradients, on the device. It reads as the scalar tensor that it holds, and may be let go unread.
#[derive(Debug)]
pub struct GradNorm(Tensor);

impl std::ops::Deref for GradNorm {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.0
    }
}

/// Scales the gradients of `params` down so that their 2-norm, taken over all as one vector, is at most `max_norm`.
///
/// Returns the norm before, a scalar where the first gradient is; 0 when there are no gradients. Unscale first where
/// there is a `GradScaler`.
///
/// # Errors
/// When `max_norm` is negative or NaN, or libtorch fails.
///
/// # Syncs
/// No: the factor is computed and applied on the device, 1 where nothing has to be clipped.
///
/// # Source
/// `torch.nn.utils.clip_grad_norm_(foreach=True)`
pub fn clip_grad_norm_(params: impl AsRef<[Tensor]>, max_norm: f64) -> Result<GradNorm, OptimizerError> {
    if max_norm.is_nan() || max_norm < 0.0 {
        return Err(OptimizerError::InvalidOption { option: "max_norm", found: max_norm, expected: "at least 0" });
    }
    Ok(GradNorm(clip(params.as_ref(), max_norm)?))
}

fn clip(params: &[Tensor], max_norm: f64) -> Result<Tensor, TorchError> {
    let _no_grad = tch::no_grad_guard();
    let mut groups: Vec<((Device, Kind), Vec<Tensor>)> = Vec::new();
    for param in params {
        let grad = param.f_grad()?;
        if !grad.defined() {
            continue;
        }
        let key = (grad.device(), grad.kind());
        match groups.iter_mut().find(|(known, _)| *known == key) {
            Some((_, grads)) => grads.push(grad),
            None => groups.push((key, vec![grad])),
        }
    }
    let Some(((device, _), _)) = groups.first() else { return Ok(Tensor::f_zeros([], (Kind::Float, Device::Cpu))?) };
    let device = *device;
    let mut norms = Vec::new();
    let mut lists = Vec::new();
    for ((_, kind), grads) in &groups {
        let list = TensorList::new(grads)?;
        for value in FOREACH_NORM.call(&[Arg::TensorList(&list), Arg::Int(2)])? {
            if let Value::TensorList(of_group) = value {
                for norm in of_group.to_vec()? {
                    norms.push(norm.f_to_device_(device, *kind, device.is_cuda(), false)?);
                }
            }
        }
        lists.push(list);
    }
    let norm = Tensor::f_stack(&norms, 0)?.f_norm()?;
    // Never above 1: gradients that are small enough stay as they are.
    let inverse = ADD.tensor(&[Arg::Tensor(&norm), Arg::Double(EPS)])?.f_reciprocal()?;
    let factor = MUL.tensor(&[Arg::Tensor(&inverse), Arg::Double(max_norm)])?;
    let factor = CLAMP_MAX.tensor(&[Arg::Tensor(&factor), Arg::Double(1.0)])?;
    for (((device, _), _), list) in groups.iter().zip(&lists) {
        let factor = factor.f_to_device_(*device, factor.kind(), device.is_cuda(), false)?;
        FOREACH_MUL.call(&[Arg::TensorList(list), Arg::Tensor(&factor)])?;
    }
    Ok(norm)
}
