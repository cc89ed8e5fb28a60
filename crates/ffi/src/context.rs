//! Switches of libtorch.

use crate::error::{Error, check};
use crate::raw;

/// Whether autograd records the operators of this thread: not under [`tch::no_grad`].
///
/// # Source
/// `torch.is_grad_enabled()`
pub fn grad_enabled() -> bool {
    // SAFETY: no pointers.
    unsafe { raw::od_grad_enabled() != 0 }
}

/// Makes operators of the calling thread run on that thread only, as long as it lives; other threads are not affected.
/// Returns false where this libtorch does not support that.
///
/// For threads that work in parallel: otherwise each of them would start its own thread pool.
///
/// # Errors
/// When libtorch fails.
///
/// # Source
/// `torch.set_num_threads(1)`, as PyTorch's DataLoader calls it in its worker processes.
pub fn use_one_thread() -> Result<bool, Error> {
    let mut used = 0;
    // SAFETY: `used` lives through the call.
    check(|err| unsafe { raw::od_use_one_thread(&mut used, err) })?;
    Ok(used != 0)
}

/// Whether float32 matrix products on CUDA may use TF32's 10-bit mantissa. The default is no.
///
/// # Errors
/// When libtorch's newer per-operator switches were set, so that there is no single answer.
///
/// # Source
/// `torch.backends.cuda.matmul.allow_tf32`
pub fn matmul_allow_tf32() -> Result<bool, Error> {
    let mut out = 0;
    // SAFETY: `out` lives through the call.
    check(|err| unsafe { raw::od_matmul_allow_tf32(&mut out, err) })?;
    Ok(out != 0)
}

/// Allows or forbids TF32 for float32 matrix products, for the whole process.
///
/// # Errors
/// When libtorch refuses.
///
/// # Source
/// `torch.backends.cuda.matmul.allow_tf32`
pub fn set_matmul_allow_tf32(allow: bool) -> Result<(), Error> {
    // SAFETY: no pointers but the error slot.
    check(|err| unsafe { raw::od_set_matmul_allow_tf32(i32::from(allow), err) })
}

/// Whether float32 convolutions on CUDA may use TF32's 10-bit mantissa. The default is yes.
///
/// # Errors
/// When libtorch's newer per-operator switches were set, so that there is no single answer.
///
/// # Source
/// `torch.backends.cudnn.allow_tf32`
pub fn cudnn_allow_tf32() -> Result<bool, Error> {
    let mut out = 0;
    // SAFETY: `out` lives through the call.
    check(|err| unsafe { raw::od_cudnn_allow_tf32(&mut out, err) })?;
    Ok(out != 0)
}

/// Allows or forbids TF32 for float32 convolutions, for the whole process.
///
/// # Errors
/// When libtorch refuses.
///
/// # Source
/// `torch.backends.cudnn.allow_tf32`
pub fn set_cudnn_allow_tf32(allow: bool) -> Result<(), Error> {
    // SAFETY: no pointers but the error slot.
    check(|err| unsafe { raw::od_set_cudnn_allow_tf32(i32::from(allow), err) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_is_only_for_the_calling_thread() {
        // On a new thread, because tests share threads.
        std::thread::spawn(|| {
            tch::set_num_threads(3);
            let seen = std::thread::spawn(|| (use_one_thread().unwrap(), tch::get_num_threads())).join().unwrap();
            assert_eq!(seen, (true, 1));
            assert_eq!(tch::get_num_threads(), 3);
            assert_eq!(std::thread::spawn(tch::get_num_threads).join().unwrap(), 3);
        })
        .join()
        .unwrap();
    }
}
