//! Process-wide switches of libtorch.

use crate::error::{Error, check};
use crate::raw;

/// Whether float32 matrix products and convolutions on CUDA may use TF32's 10-bit mantissa.
///
/// # Errors
/// When the settings were mixed through libtorch's newer per-operator switches and have no single answer.
///
/// # Source
/// `torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32`
pub fn allow_tf32() -> Result<bool, Error> {
    let mut out = 0;
    // SAFETY: `out` lives through the call.
    check(|err| unsafe { raw::od_get_allow_tf32(&mut out, err) })?;
    Ok(out != 0)
}

/// Allows or forbids TF32 for matrix products and convolutions alike, for the whole process.
///
/// # Errors
/// When libtorch refuses.
///
/// # Source
/// `torch.backends.cuda.matmul.allow_tf32`, `torch.backends.cudnn.allow_tf32`
pub fn set_allow_tf32(allow: bool) -> Result<(), Error> {
    // SAFETY: no pointers but the error slot.
    check(|err| unsafe { raw::od_set_allow_tf32(i32::from(allow), err) })
}
