//! Norms of whole tensors, and trust ratios (the factor by which LARS and LAMB scale a parameter's step), computed on
//! the device without waiting for it.

use overdrive_core::TorchError;
use overdrive_ffi::{Arg, LazyOp, TensorList};
use tch::{Kind, Tensor};

use crate::foreach;

static CLAMP_MAX: LazyOp = LazyOp::new("aten::clamp_max", "");

/// The 2-norm of each tensor, as one float64 vector.
pub(crate) fn norms(tensors: &TensorList) -> Result<Tensor, TorchError> {
    Ok(Tensor::f_stack(&foreach::norm(tensors, 2.0)?.to_vec()?, 0)?.f_to_kind(Kind::Double)?)
}

/// The elements of a vector as a list of scalar tensors, for operators on lists.
pub(crate) fn as_list(vector: &Tensor) -> Result<TensorList, TorchError> {
    TensorList::new(&vector.f_unbind(0)?)
}

/// `ratios`, with 1 wherever one of the two norms is 0: where a parameter, or its update or gradient, is all zeros, the
/// step is not scaled.
pub(crate) fn or_one(ratios: &Tensor, norms: &Tensor, step_norms: &Tensor) -> Result<Tensor, TorchError> {
    let both_nonzero = norms.f_mul(step_norms)?.f_to_kind(Kind::Bool)?;
    Ok(ratios.f_where_self(&both_nonzero, &ratios.f_ones_like()?)?)
}

/// The ratios, clamped to at most 1.
pub(crate) fn at_most_one(ratios: &Tensor) -> Result<Tensor, TorchError> {
    CLAMP_MAX.tensor(&[Arg::Tensor(ratios), Arg::Double(1.0)])
}
