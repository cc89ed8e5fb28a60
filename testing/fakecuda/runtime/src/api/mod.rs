//! The C functions of libcudart.
//!
//! Each takes what libtorch gives it: pointers that are valid for what the real function would read or write there.

mod captures;
mod control;
mod cublas;
mod cudnn;
mod cupti;
mod device;
mod driver;
mod events;
mod faults;
mod graphs;
mod host_functions;
mod ipc;
mod launch;
pub mod memory;
mod modules;
mod nccl;
mod nccl_calls;
#[cfg(test)]
mod nccl_failure_tests;
mod nccl_memory;
#[cfg(test)]
pub mod nccl_tests;
mod nvml;
mod operators;
mod orders;
mod pools;
mod queries;
mod streams;
mod symbols;

use crate::error::CudaError;
use crate::world::{LAST_ERROR, is_in_host_function};

/// What a C function returns; an error is also the thread's last one.
fn code(result: Result<(), CudaError>) -> i32 {
    match result {
        Ok(()) => 0,
        Err(_) if is_in_host_function() => CudaError::NOT_PERMITTED.0,
        Err(error) => {
            LAST_ERROR.set(error.0);
            error.0
        }
    }
}

/// A function of one of the libraries that this one does not define was called: counts and names it.
///
/// # Safety
/// `name` has to be a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fakecuda_missing(name: *const std::ffi::c_char) -> i32 {
    // SAFETY: as the caller says.
    let name = unsafe { std::ffi::CStr::from_ptr(name) }.to_string_lossy();
    crate::world::world().count(&format!("missing {name}"), 1);
    eprintln!("fakecuda: no stand-in for {name}");
    CudaError::NOT_SUPPORTED.0
}
