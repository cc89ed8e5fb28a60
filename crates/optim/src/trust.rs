//! Norms of whole parameters, and trust ratios from them, without waiting for the device.

use overdrive_core::TorchError;
use overdrive_ffi::{Arg, LazyOp, TensorList};
use tch::{Kind, Tensor};

use crate::foreach;

static CLAMP_MAX: LazyOp = LazyOp::new("aten::clamp_max", "");

/// The 2-norm of each tensor, as one float64 vector.
pub(crate) fn norms(tensors: &TensorList) -> Result<Tensor, TorchError> {
    Ok(Tensor::f_stack(&foreach::norm(tensors, 2.0)?.to_vec()?, 0)?.f_to_kind(Kind::Double)?)
}

/// The numbers of a vector, each as a scalar tensor.
pub(crate) fn as_list(vector: &Tensor) -> Result<TensorList, TorchError> {
    TensorList::new(&vector.f_unbind(0)?)
}

/// `ratios`, with 1 wherever one of the two norms is 0: a parameter or an update that is all zeros is stepped without
/// scaling.
pub(crate) fn or_one(ratios: &Tensor, norms: &Tensor, others: &Tensor) -> Result<Tensor, TorchError> {
    let both = norms.f_mul(others)?.f_to_kind(Kind::Bool)?;
    Ok(ratios.f_where_self(&both, &ratios.f_ones_like()?)?)
}

/// The ratios, clamped to at most 1.
pub(crate) fn at_most_one(ratios: &Tensor) -> Result<Tensor, TorchError> {
    CLAMP_MAX.tensor(&[Arg::Tensor(ratios), Arg::Double(1.0)])
}
