//! cuDNN's versions and handles. Its convolutions and normalisations are launched by `testing/fakecuda/operators`.

use std::ffi::c_char;

/// 9.10.2, as `cudnnGetVersion` tells it, of CUDA 13.0.
const VERSION: usize = 91_002;

#[unsafe(no_mangle)]
pub extern "C" fn cudnnGetVersion() -> usize {
    VERSION
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnGetCudartVersion() -> usize {
    13_000
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnGetErrorString(_status: i32) -> *const c_char {
    c"fake cuDNN: not supported".as_ptr()
}

/// # Safety
/// `handle` has to be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnCreate(handle: *mut usize) -> i32 {
    // SAFETY: as the caller says.
    unsafe { *handle = 16 };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnSetStream(_handle: usize, _stream: usize) -> i32 {
    0
}
