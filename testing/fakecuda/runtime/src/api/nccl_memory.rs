//! NCCL's functions for memory. Nothing of it is special here.

use std::ffi::c_void;

use super::memory::{cudaFree, cudaMalloc};
use super::nccl::{invalid, place};
use crate::nccl::code::{Code, result};
use crate::nccl::communicator;

/// Nothing has to be registered here. The handle is the address.
///
/// # Safety
/// `handle` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommRegister(own: usize, address: usize, _bytes: usize, handle: *mut usize) -> i32 {
    // SAFETY: as the caller says.
    let found = communicator::of(own).and_then(|_| unsafe { place(handle) });
    result(found.map(|handle| *handle = address).map(|()| Code::SUCCESS))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDeregister(own: usize, _handle: usize) -> i32 {
    result(communicator::of(own).map(|_| Code::SUCCESS))
}

/// There are no windows: as NCCL does on a machine without symmetric memory, it succeeds without one.
///
/// # Safety
/// `window` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommWindowRegister(
    own: usize,
    _address: usize,
    _bytes: usize,
    window: *mut *mut c_void,
    _flags: i32,
) -> i32 {
    // SAFETY: as the caller says.
    let found = communicator::of(own).and_then(|_| unsafe { place(window) });
    result(found.map(|window| *window = std::ptr::null_mut()).map(|()| Code::SUCCESS))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommWindowDeregister(own: usize, _window: usize) -> i32 {
    result(communicator::of(own).map(|_| Code::SUCCESS))
}

fn of_cuda(error: i32) -> i32 {
    if error == 0 { Code::SUCCESS.0 } else { Code::UNHANDLED_CUDA.0 }
}

/// # Safety
/// `address` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclMemAlloc(address: *mut usize, bytes: usize) -> i32 {
    if address.is_null() || bytes == 0 {
        return result(Err(invalid("no place for an address, or no bytes")));
    }
    // SAFETY: as the caller says.
    of_cuda(unsafe { cudaMalloc(address, bytes) })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclMemFree(address: usize) -> i32 {
    of_cuda(cudaFree(address))
}
