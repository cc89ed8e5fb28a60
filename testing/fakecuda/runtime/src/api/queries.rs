//! What libtorch asks before it launches or allocates.

use std::ffi::c_char;

use super::code;
use crate::error::CudaError;

/// `cudaFuncAttributes`, as far as libtorch reads it.
#[repr(C)]
pub struct FunctionAttributes {
    shared_bytes: usize,
    constant_bytes: usize,
    local_bytes: usize,
    max_threads_per_block: i32,
    registers: i32,
    ptx_version: i32,
    binary_version: i32,
    cache_mode: i32,
    max_dynamic_shared_bytes: i32,
    more: [i32; 24],
}

/// # Safety
/// `attributes` has to be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaFuncGetAttributes(attributes: *mut FunctionAttributes, _function: usize) -> i32 {
    // SAFETY: as the caller says; zeros are a value of each field.
    unsafe {
        attributes.write_bytes(0, 1);
        (*attributes).max_threads_per_block = 1024;
        (*attributes).registers = 32;
        ((*attributes).ptx_version, (*attributes).binary_version) = (90, 90);
        (*attributes).max_dynamic_shared_bytes = 232_448;
    }
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaFuncSetAttribute(_function: usize, _attribute: i32, _value: i32) -> i32 {
    0
}

/// # Safety
/// `blocks` has to be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: *mut i32,
    _function: usize,
    block_size: i32,
    shared: usize,
) -> i32 {
    let by_threads = (2048 / block_size.max(1)).min(32);
    let by_memory = 233_472usize.checked_div(shared).map_or(i32::MAX, |blocks| blocks as i32);
    // SAFETY: as the caller says.
    unsafe { *blocks = by_threads.min(by_memory) };
    0
}

/// # Safety
/// As `cudaOccupancyMaxActiveBlocksPerMultiprocessor`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    blocks: *mut i32,
    function: usize,
    block_size: i32,
    shared: usize,
    _flags: u32,
) -> i32 {
    // SAFETY: as the caller says.
    unsafe { cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, block_size, shared) }
}

/// # Safety
/// `text` has to be valid for writes of `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaDeviceGetPCIBusId(text: *mut c_char, length: i32, device: i32) -> i32 {
    let own = format!("0000:{:02x}:00.0\0", device + 1);
    if own.len() > usize::try_from(length).unwrap_or(0) {
        return code(Err(CudaError::INVALID_VALUE));
    }
    // SAFETY: as the caller says, and it fits.
    unsafe { std::ptr::copy_nonoverlapping(own.as_ptr().cast(), text, own.len()) };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaProfilerStart() -> i32 {
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaProfilerStop() -> i32 {
    0
}
