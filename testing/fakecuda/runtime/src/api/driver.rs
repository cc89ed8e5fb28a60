//! The driver functions that libtorch uses: contexts, and what it looks up by name.

use std::ffi::{CStr, c_char, c_void};

use super::code;
use super::device::{attribute, cudaDeviceGetAttribute};
use crate::error::CudaError;
use crate::world::{CURRENT, world};

/// The handle of a device's primary context.
fn context(device: usize) -> usize {
    0x10 + device
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_flags: u32) -> i32 {
    0
}

/// # Safety
/// `device` has to be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut i32, number: i32) -> i32 {
    let count = world().devices.len();
    if usize::try_from(number).is_ok_and(|number| number < count) {
        // SAFETY: as the caller says.
        unsafe { *device = number };
        return 0;
    }
    CudaError::INVALID_DEVICE.0
}

/// # Safety
/// `value` has to be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut i32, number: i32, _device: i32) -> i32 {
    // SAFETY: as the caller says. The driver's numbers are the runtime's.
    unsafe { *value = attribute(number) };
    0
}

/// # Safety
/// Both have to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxGetState(device: i32, flags: *mut u32, active: *mut i32) -> i32 {
    let Some(has_context) = world().devices.get(device as usize).map(|device| device.context.is_some()) else {
        return CudaError::INVALID_DEVICE.0;
    };
    // SAFETY: as the caller says.
    unsafe {
        if !flags.is_null() {
            *flags = 0;
        }
        if !active.is_null() {
            *active = i32::from(has_context);
        }
    }
    0
}

/// # Safety
/// `context` has to be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(own: *mut usize, device: i32) -> i32 {
    code(world().use_device(device as usize).map(|()| {
        // SAFETY: as the caller says.
        unsafe { *own = context(device as usize) };
    }))
}

/// # Safety
/// `context` has to be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(own: *mut usize) -> i32 {
    let device = CURRENT.get();
    let has_context = world().devices.get(device).is_some_and(|device| device.context.is_some());
    // SAFETY: as the caller says.
    unsafe { *own = if has_context { context(device) } else { 0 } };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(own: usize) -> i32 {
    code(match own.checked_sub(context(0)) {
        Some(device) => world().use_device(device).map(|()| CURRENT.set(device)),
        // No context.
        None => Ok(()),
    })
}

/// # Safety
/// `text` has to be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(error: i32, text: *mut *const c_char) -> i32 {
    // SAFETY: as the caller says.
    unsafe { *text = CudaError(error).words().1.as_ptr().cast() };
    0
}

/// A driver function that libtorch looks up by its name. One that is not there can be called, and says "not supported".
///
/// # Safety
/// `name` has to be a text that ends with a zero byte, `function` valid for writes, `found` null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGetDriverEntryPointByVersion(
    name: *const c_char,
    function: *mut *const c_void,
    _version: u32,
    _flags: u64,
    found: *mut i32,
) -> i32 {
    extern "C" fn not_supported() -> i32 {
        CudaError::NOT_SUPPORTED.0
    }
    // SAFETY: as the caller says.
    let own: *const c_void = match unsafe { CStr::from_ptr(name) }.to_bytes() {
        b"cuDeviceGet" => cuDeviceGet as *const c_void,
        b"cuDeviceGetAttribute" => cudaDeviceGetAttribute as *const c_void,
        b"cuCtxGetCurrent" => cuCtxGetCurrent as *const c_void,
        b"cuCtxSetCurrent" => cuCtxSetCurrent as *const c_void,
        b"cuGetErrorString" => cuGetErrorString as *const c_void,
        _ => not_supported as *const c_void,
    };
    // SAFETY: as the caller says.
    unsafe {
        *function = own;
        if !found.is_null() {
            *found = 0;
        }
    }
    0
}
