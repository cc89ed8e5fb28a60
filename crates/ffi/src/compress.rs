//! Compresses gradients with error feedback, to their signs or their largest elements (top k). Float32 on a CPU, in few
//! passes over memory.

use std::ptr;

use tch::{Device, Kind, Tensor};

use crate::error::{Error, check};
use crate::raw_c10d as raw;

/// Whether the functions here accept this tensor: contiguous float32 on a CPU.
pub fn takes(tensor: &Tensor) -> bool {
    tensor.device() == Device::Cpu && tensor.kind() == Kind::Float && tensor.is_contiguous()
}

/// Adds a gradient to the error feedback, `error`, in place. Returns the signs of the sum and a scale, and subtracts
/// what they stand for from `error`.
///
/// # Shapes
/// `grad`: `[n]`. `error`: `[m]`, a multiple of 8 and at least `n`. Returns the signs, `[m / 8]` bytes, in which the
/// first sign is the lowest bit, and the scale `[1]`: the root mean square of the `n` sums.
///
/// # Errors
/// For other shapes, or tensors that [`takes`] refuses.
pub fn sign_compress(grad: &Tensor, error: &Tensor) -> Result<(Tensor, Tensor), Error> {
    let (mut packed, mut scale) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: both tensors live through the call, which checks their sizes before it writes.
    check(|err| unsafe { raw::od_sign_compress(grad.as_ptr(), error.as_ptr(), &mut packed, &mut scale, err) })?;
    // SAFETY: on success both are tensors that we own.
    Ok(unsafe { (Tensor::from_ptr(packed), Tensor::from_ptr(scale)) })
}

/// Writes `value` to `out` where a sign is positive and `-value` elsewhere; with `add`, adds it instead.
///
/// # Shapes
/// `packed`: `[m / 8]`. `out`: `[n]`, `n` at most `m`.
///
/// # Errors
/// For other shapes, or tensors that [`takes`] refuses.
pub fn sign_expand(packed: &Tensor, value: f32, out: &Tensor, add: bool) -> Result<(), Error> {
    // SAFETY: both tensors live through the call, which checks their sizes before it writes.
    check(|err| unsafe { raw::od_sign_expand(packed.as_ptr(), value, out.as_ptr(), i32::from(add), err) })
}

/// Adds a gradient to the error feedback, `error`, in place. Returns the `kept` elements of the sum that are largest in
/// magnitude, and sets them to zero in `error`. Of equal elements the first are taken; NaN counts as the largest.
///
/// # Shapes
/// `grad` and `error`: `[n]`, below 2^31. Returns indices `[kept]`, int32, and values `[kept]`.
///
/// # Errors
/// For other shapes, or tensors that [`takes`] refuses.
pub fn take_largest(grad: &Tensor, error: &Tensor, kept: i64) -> Result<(Tensor, Tensor), Error> {
    let (mut places, mut values) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: both tensors live through the call, which checks their sizes before it writes.
    check(|err| unsafe { raw::od_take_largest(grad.as_ptr(), error.as_ptr(), kept, &mut places, &mut values, err) })?;
    // SAFETY: on success both are tensors that we own.
    Ok(unsafe { (Tensor::from_ptr(places), Tensor::from_ptr(values)) })
}
