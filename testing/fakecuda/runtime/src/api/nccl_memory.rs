//! NCCL's functions for memory: what is registered at a communicator, and where.

use std::ffi::c_void;

use super::memory::{cudaFree, cudaMalloc};
use super::nccl::{invalid, place};
use crate::nccl::code::{Code, Failure, result};
use crate::nccl::communicator;
use crate::world::world;

/// Notes memory as registered, and gives its handle, which is never 0.
fn register(own: usize, address: usize, bytes: usize) -> Result<usize, Failure> {
    let communicator = communicator::of(own)?;
    if address == 0 || bytes == 0 {
        return Err(invalid("no memory to register"));
    }
    let handle = communicator.register(address, bytes).ok_or_else(|| invalid("this memory is registered already"))?;
    world().count("nccl registrations of memory", 1);
    Ok(handle)
}

fn deregister(own: usize, handle: usize) -> Result<(), Failure> {
    let was_there = communicator::of(own)?.deregister(handle);
    was_there.then(|| world().count("nccl deregistrations of memory", 1)).ok_or_else(|| invalid("no such registration"))
}

/// # Safety
/// `handle` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommRegister(own: usize, address: usize, bytes: usize, handle: *mut usize) -> i32 {
    // SAFETY: as the caller says.
    let found = unsafe { place(handle) }.and_then(|handle| Ok((handle, register(own, address, bytes)?)));
    result(found.map(|(handle, registered)| *handle = registered).map(|()| Code::SUCCESS))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDeregister(own: usize, handle: usize) -> i32 {
    result(deregister(own, handle).map(|()| Code::SUCCESS))
}

/// The window is the handle of a registration: nothing reads it.
///
/// # Safety
/// `window` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommWindowRegister(
    own: usize,
    address: usize,
    bytes: usize,
    window: *mut *mut c_void,
    _flags: i32,
) -> i32 {
    // SAFETY: as the caller says.
    let found = unsafe { place(window) }.and_then(|window| Ok((window, register(own, address, bytes)?)));
    result(found.map(|(window, handle)| {
        world().count("nccl windows", 1);
        *window = std::ptr::without_provenance_mut(handle);
        Code::SUCCESS
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommWindowDeregister(own: usize, window: usize) -> i32 {
    result(deregister(own, window).map(|()| Code::SUCCESS))
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
    world().count("nccl allocations of memory", 1);
    // SAFETY: as the caller says.
    of_cuda(unsafe { cudaMalloc(address, bytes) })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclMemFree(address: usize) -> i32 {
    of_cuda(cudaFree(address))
}
