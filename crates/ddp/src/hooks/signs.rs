//! Signs packed eight to a byte, with one common scale.

use overdrive_ffi::{Arg, DeviceConstants, LazyOp, compress as kernels};
use tch::{Kind, Tensor};

use crate::error::DdpError;

static GE: LazyOp = LazyOp::new("aten::ge", "Scalar");
static NE: LazyOp = LazyOp::new("aten::ne", "Scalar");
static MUL: LazyOp = LazyOp::new("aten::mul", "Scalar");
static ADD: LazyOp = LazyOp::new("aten::add", "Scalar");
static DIV: LazyOp = LazyOp::new("aten::div", "Scalar");
static MASKED_FILL: LazyOp = LazyOp::new("aten::masked_fill_", "Scalar");
static NORM: LazyOp = LazyOp::new("aten::linalg_vector_norm", "");

/// Adds gradients to `error` in place, returns the sum's signs and their scale, and leaves the rounding error in
/// `error`.
///
/// `error` may be longer than `grads`, to fill whole bytes; the padding stays without error.
pub(crate) fn compress(grads: &Tensor, error: &Tensor) -> Result<(Tensor, Tensor), DdpError> {
    if kernels::takes(grads) && kernels::takes(error) {
        return Ok(kernels::sign_compress(grads, error)?);
    }
    let count = grads.numel() as i64;
    let mut whole = error.f_narrow(0, 0, count)?.f_add_(grads)?;
    let norm = NORM.tensor(&[Arg::Tensor(&whole), Arg::Double(2.0)])?;
    let scale = DIV.tensor(&[Arg::Tensor(&norm), Arg::Double((count.max(1) as f64).sqrt())])?;
    let positive = GE.tensor(&[Arg::Tensor(error), Arg::Double(0.0)])?;
    let eights = positive.f_view([-1, 8])?.f_to_kind(Kind::Uint8)?;
    let packed = eights.f_mul(&bits(error)?)?.f_sum_dim_intlist(1, false, Kind::Uint8)?;
    let _in_place = whole.f_sub_(&signed(&positive.f_narrow(0, 0, count)?, &scale, error)?)?;
    // An infinity or NaN belongs to this step only, whose scale carries it to all ranks; kept in the error, it would
    // spoil every later step.
    let lost = scale.f_isfinite()?.f_logical_not()?;
    MASKED_FILL.call(&[Arg::Tensor(&whole), Arg::Tensor(&lost), Arg::Double(0.0)])?;
    Ok((packed, scale.f_view([1])?))
}

/// Writes the signs times their scale times `factor` to `out`, or adds them to it.
pub(crate) fn expand(packed: &Tensor, scale: &Tensor, factor: f64, out: &Tensor, add: bool) -> Result<(), DdpError> {
    if kernels::takes(out) {
        let value = (scale.f_double_value(&[0])? * factor) as f32;
        return Ok(kernels::sign_expand(packed, value, out, add)?);
    }
    let eights = packed.f_unsqueeze(1)?.f_bitwise_and_tensor(&bits(out)?)?;
    let positive = NE.tensor(&[Arg::Tensor(&eights), Arg::Int(0)])?.f_view([-1])?.f_narrow(0, 0, out.numel() as i64)?;
    let scale = MUL.tensor(&[Arg::Tensor(&scale.f_squeeze()?), Arg::Double(factor)])?;
    let values = signed(&positive, &scale, out)?;
    let mut out = out.shallow_clone();
    if add {
        drop(out.f_add_(&values)?)
    } else {
        out.f_copy_(&values)?
    }
    Ok(())
}

/// `scale` where `positive` is set, and `-scale` elsewhere.
fn signed(positive: &Tensor, scale: &Tensor, like: &Tensor) -> Result<Tensor, DdpError> {
    let twice = MUL.tensor(&[Arg::Tensor(&positive.f_to_kind(like.kind())?), Arg::Double(2.0)])?;
    Ok(ADD.tensor(&[Arg::Tensor(&twice), Arg::Double(-1.0)])?.f_mul(scale)?)
}

/// The bit masks of the eight signs in a byte.
fn bits(like: &Tensor) -> Result<Tensor, DdpError> {
    static BITS: DeviceConstants<1> = DeviceConstants::new();
    let make = || Ok::<_, DdpError>([Tensor::f_from_slice(&[1u8, 2, 4, 8, 16, 32, 64, 128])?]);
    let [bits] = BITS.on(like.device(), make)?;
    Ok(bits)
}
