//! Clipping of gradients, by their norm or by value, without waiting for the device.

use overdrive_core::{IntoParameters, OptimizerError, Parameter, SHARDED_GRADIENTS, STEPPED_IN_BACKWARD, TorchError};
use overdrive_ffi::{Arg, LazyOp, TensorList};
use tch::{Device, Kind, Tensor};

use crate::bucket::sparse;
use crate::foreach;

static NORM: LazyOp = LazyOp::new("aten::linalg_vector_norm", "");
static ADD: LazyOp = LazyOp::new("aten::add", "Scalar");
static MUL: LazyOp = LazyOp::new("aten::mul", "Scalar");
static CLAMP_MAX: LazyOp = LazyOp::new("aten::clamp_max", "");
static CLAMP_MIN: LazyOp = LazyOp::new("aten::clamp_min", "");

/// PyTorch's guard against a division by zero.
const EPS: f64 = 1e-6;

/// A norm of gradients: dereferences to a scalar tensor on the device. It need not be read.
#[derive(Debug)]
pub struct GradNorm(Tensor);

impl std::ops::Deref for GradNorm {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.0
    }
}

/// Scales the gradients of `params` down so that their 2-norm, over all of them as one vector, is at most `max_norm`.
///
/// Returns the norm before clipping, a scalar on the first gradient's device; 0 when there are no gradients. With a
/// `GradScaler`, call `unscale_` first. [`ClipGradNorm`] has more options.
///
/// # Errors
/// When `max_norm` is negative or NaN, a gradient is sparse, a parameter is stepped in backward, or libtorch fails.
///
/// # Syncs
/// No: the factor is computed and applied on the device; it is 1 when the norm is small enough.
///
/// # Source
/// `torch.nn.utils.clip_grad_norm_(foreach=True)`
pub fn clip_grad_norm_(params: impl IntoParameters, max_norm: f64) -> Result<GradNorm, OptimizerError> {
    ClipGradNorm::new(max_norm).clip_(params)
}

/// [`clip_grad_norm_`] with another norm, or with an error when the norm is infinite or NaN.
///
/// # Source
/// `torch.nn.utils.clip_grad_norm_(norm_type, error_if_nonfinite)`
#[derive(Clone, Copy, Debug)]
#[must_use = "options do nothing until `clip_`"]
pub struct ClipGradNorm {
    max_norm: f64,
    norm_type: f64,
    error_if_nonfinite: bool,
}

impl ClipGradNorm {
    /// Clips the 2-norm to `max_norm`.
    pub fn new(max_norm: f64) -> Self {
        Self { max_norm, norm_type: 2.0, error_if_nonfinite: false }
    }

    /// The order of the norm, above 0; [`f64::INFINITY`] for the largest absolute entry; default 2.
    pub fn norm_type(mut self, norm_type: f64) -> Self {
        self.norm_type = norm_type;
        self
    }

    /// Whether an infinite or NaN norm is an error, which leaves the gradients unchanged; default false.
    ///
    /// # Syncs
    /// When true, clipping waits for the norm.
    pub fn error_if_nonfinite(mut self, error: bool) -> Self {
        self.error_if_nonfinite = error;
        self
    }

    /// Clips the gradients of `params`, and returns their norm before clipping.
    ///
    /// # Errors
    /// When `max_norm` is negative or NaN, the norm's order is not above 0, a gradient is sparse or sharded over ranks, a
    /// parameter is stepped in backward, libtorch fails, or the norm is not finite and `error_if_nonfinite` is set.
    ///
    /// # Syncs
    /// Only with [`error_if_nonfinite`](Self::error_if_nonfinite).
    pub fn clip_(self, params: impl IntoParameters) -> Result<GradNorm, OptimizerError> {
        if self.max_norm.is_nan() || self.max_norm < 0.0 {
            let (option, found) = ("max_norm", self.max_norm);
            return Err(OptimizerError::InvalidOption { option, found, expected: "at least 0" });
        }
        if self.norm_type.is_nan() || self.norm_type <= 0.0 {
            let (option, found) = ("norm_type", self.norm_type);
            return Err(OptimizerError::InvalidOption { option, found, expected: "above 0, or infinity" });
        }
        let _no_grad = tch::no_grad_guard();
        let params = params.into_parameters();
        if let Some(index) = SHARDED_GRADIENTS.position(params.iter().map(Parameter::tensor)) {
            let reason = "its gradient is on one rank alone, so that each rank would see another norm: call \
                          `clip_grad_norm_` of the `ShardedDataParallel`";
            return Err(OptimizerError::parameter(&params[index], index, reason));
        }
        let groups = by_place(&params)?;
        let Some(device) = groups.first().map(|group| group.device) else {
            return Ok(GradNorm(Tensor::f_zeros([], (Kind::Float, Device::Cpu)).map_err(TorchError::from)?));
        };
        let norm = total(&groups, self.norm_type, device)?;
        if self.error_if_nonfinite {
            let found = norm.f_double_value(&[]).map_err(TorchError::from)?;
            if !found.is_finite() {
                return Err(OptimizerError::NonFiniteNorm { norm_type: self.norm_type, found });
            }
        }
        scale(&groups, &norm, self.max_norm)?;
        Ok(GradNorm(norm))
    }
}

/// Clamps every entry of the gradients of `params` to [-`clip_value`, `clip_value`].
///
/// # Errors
/// When `clip_value` is negative or NaN, a gradient is sparse, a parameter is stepped in backward, or libtorch fails.
///
/// # Syncs
/// No.
///
/// # Source
/// `torch.nn.utils.clip_grad_value_`
pub fn clip_grad_value_(params: impl IntoParameters, clip_value: f64) -> Result<(), OptimizerError> {
    if clip_value.is_nan() || clip_value < 0.0 {
        let (option, found) = ("clip_value", clip_value);
        return Err(OptimizerError::InvalidOption { option, found, expected: "at least 0" });
    }
    let _no_grad = tch::no_grad_guard();
    for group in by_place(&params.into_parameters())? {
        foreach::clamp_min_(&group.grads, -clip_value)?;
        foreach::clamp_max_(&group.grads, clip_value)?;
    }
    Ok(())
}

/// Gradients of the same device and dtype.
struct Grads {
    device: Device,
    kind: Kind,
    grads: TensorList,
}

/// The gradients that are defined, by device and dtype.
fn by_place(params: &[Parameter]) -> Result<Vec<Grads>, OptimizerError> {
    if let Some(index) = STEPPED_IN_BACKWARD.position(params.iter().map(Parameter::tensor)) {
        let reason = "it is stepped in backward, before anything can be clipped: build the optimizer with `build` \
                      (`CpuOffloadOptimizer` with `new`)";
        return Err(OptimizerError::parameter(&params[index], index, reason));
    }
    let mut groups: Vec<((Device, Kind), Vec<Tensor>)> = Vec::new();
    for (index, param) in params.iter().enumerate() {
        let tensor = param.tensor();
        if !tensor.defined() {
            return Err(OptimizerError::parameter(param, index, "it is undefined"));
        }
        let grad = tensor.f_grad().map_err(TorchError::from)?;
        if !grad.defined() {
            continue;
        }
        if grad.is_sparse() {
            return Err(sparse(param, index));
        }
        let key = (grad.device(), grad.kind());
        match groups.iter_mut().find(|(known, _)| *known == key) {
            Some((_, grads)) => grads.push(grad),
            None => groups.push((key, vec![grad])),
        }
    }
    let listed =
        |((device, kind), grads): (_, Vec<Tensor>)| Ok(Grads { device, kind, grads: TensorList::new(&grads)? });
    groups.into_iter().map(listed).collect::<Result<_, TorchError>>().map_err(OptimizerError::from)
}

/// The norm over all gradients, on `device`.
fn total(groups: &[Grads], norm_type: f64, device: Device) -> Result<Tensor, TorchError> {
    let mut norms = Vec::new();
    for group in groups {
        for norm in foreach::norm(&group.grads, norm_type)?.to_vec()? {
            norms.push(norm.f_to_device_(device, group.kind, device.is_cuda(), false)?);
        }
    }
    NORM.tensor(&[Arg::Tensor(&Tensor::f_stack(&norms, 0)?), Arg::Double(norm_type)])
}

/// The 2-norm of the gradients of `params`, over all of them as one vector; `None` if there are no gradients.
pub(crate) fn norm_of(params: &[Parameter]) -> Result<Option<Tensor>, OptimizerError> {
    let groups = by_place(params)?;
    match groups.first().map(|group| group.device) {
        Some(device) => Ok(Some(total(&groups, 2.0, device)?)),
        None => Ok(None),
    }
}

/// Divides gradients of one device by `norm / max_norm` if that is above 1, as apex and timm do. PyTorch's guard
/// against a division by zero is not needed: the divisor is at least 1.
pub(crate) fn divide(grads: &TensorList, norm: &Tensor, max_norm: f64) -> Result<(), TorchError> {
    if grads.is_empty() {
        return Ok(());
    }
    let first = grads.get(0)?;
    let norm = norm.f_to_device_(first.device(), norm.kind(), first.device().is_cuda(), false)?;
    let divisor = MUL.tensor(&[Arg::Tensor(&norm), Arg::Double(1.0 / max_norm)])?;
    let divisor = CLAMP_MIN.tensor(&[Arg::Tensor(&divisor), Arg::Double(1.0)])?;
    foreach::mul_tensor_(grads, &divisor.f_reciprocal()?)
}

fn scale(groups: &[Grads], norm: &Tensor, max_norm: f64) -> Result<(), TorchError> {
    let inverse = ADD.tensor(&[Arg::Tensor(norm), Arg::Double(EPS)])?.f_reciprocal()?;
    let factor = MUL.tensor(&[Arg::Tensor(&inverse), Arg::Double(max_norm)])?;
    // Never above 1: gradients that are small enough stay as they are.
    let factor = CLAMP_MAX.tensor(&[Arg::Tensor(&factor), Arg::Double(1.0)])?;
    // On a CPU, reading the factor costs nothing, so a multiplication by 1 is skipped.
    if groups.iter().all(|group| group.device == Device::Cpu) && factor.f_double_value(&[])? == 1.0 {
        return Ok(());
    }
    for group in groups {
        let factor = factor.f_to_device_(group.device, factor.kind(), group.device.is_cuda(), false)?;
        // In reverse: on a CPU, the gradients that the norm has read last are still in the cache.
        let mut grads = group.grads.to_vec()?;
        grads.reverse();
        foreach::mul_tensor_(&TensorList::new(&grads)?, &factor)?;
    }
    Ok(())
}
