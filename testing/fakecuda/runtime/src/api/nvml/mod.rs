//! libnvidia-ml: the functions that nvml-wrapper, libtorch and Python's torch call.

mod counters;
mod figures;
mod identity;
mod processes;

use std::ffi::{CStr, c_char};

use crate::faults;
use crate::nvml::all;
use crate::world::world;

const UNINITIALIZED: i32 = 1;
const INVALID_ARGUMENT: i32 = 2;
const NOT_SUPPORTED: i32 = 3;
const NOT_FOUND: i32 = 6;
const INSUFFICIENT_SIZE: i32 = 7;
const DRIVER_NOT_LOADED: i32 = 9;
const GPU_IS_LOST: i32 = 15;
const ARGUMENT_VERSION_MISMATCH: i32 = 25;

/// The handle of the first device.
const FIRST_HANDLE: usize = 0x4e00;

fn status(result: Result<(), i32>) -> i32 {
    result.err().unwrap_or(0)
}

/// Whether the library was initialized.
fn ready() -> Result<(), i32> {
    if all().initialized > 0 { Ok(()) } else { Err(UNINITIALIZED) }
}

/// The device of a handle. Nothing works on one that is lost.
fn device_of(handle: usize) -> Result<u32, i32> {
    ready()?;
    let device = handle.checked_sub(FIRST_HANDLE).ok_or(INVALID_ARGUMENT)?;
    if device >= world().devices.len() {
        return Err(INVALID_ARGUMENT);
    }
    faults::lost(device).map_err(|_| GPU_IS_LOST)?;
    Ok(device as u32)
}

/// Writes an answer.
///
/// # Safety
/// `place` has to be null or valid for writes.
unsafe fn answer<T>(place: *mut T, value: Result<T, i32>) -> i32 {
    let written = value.and_then(|value| {
        if place.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: as the caller says, and it is not null.
        unsafe { place.write_unaligned(value) };
        Ok(())
    });
    status(written)
}

/// Writes a text and its zero byte.
///
/// # Safety
/// `place` has to be null or valid for writes of `length` bytes.
unsafe fn answer_text(place: *mut c_char, length: u32, text: Result<String, i32>) -> i32 {
    status(text.and_then(|text| {
        if place.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        if text.len() >= length as usize {
            return Err(INSUFFICIENT_SIZE);
        }
        // SAFETY: as the caller says, it is not null, and the text fits.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr().cast(), place, text.len());
            *place.add(text.len()) = 0;
        }
        Ok(())
    }))
}

fn initialize() -> i32 {
    let mut all = all();
    if all.is_driver_missing {
        return DRIVER_NOT_LOADED;
    }
    all.initialized += 1;
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit() -> i32 {
    initialize()
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> i32 {
    initialize()
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInitWithFlags(_flags: u32) -> i32 {
    initialize()
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> i32 {
    let mut all = all();
    if all.initialized == 0 {
        return UNINITIALIZED;
    }
    all.initialized -= 1;
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(error: i32) -> *const c_char {
    let text: &CStr = match error {
        0 => c"The operation was successful",
        UNINITIALIZED => c"NVML was not first initialized with nvmlInit()",
        INVALID_ARGUMENT => c"A supplied argument is invalid",
        NOT_SUPPORTED => c"The requested operation is not available on target device",
        4 => c"The current user does not have permission for operation",
        NOT_FOUND => c"A query to find an object was unsuccessful",
        INSUFFICIENT_SIZE => c"An input argument is not large enough",
        DRIVER_NOT_LOADED => c"NVIDIA driver is not loaded",
        10 => c"User provided timeout passed",
        GPU_IS_LOST => c"The GPU has fallen off the bus or has otherwise become inaccessible",
        16 => c"The GPU requires a reset before it can be used again",
        ARGUMENT_VERSION_MISMATCH => c"The provided version is invalid/unsupported",
        _ => c"An internal driver error occurred",
    };
    text.as_ptr()
}

/// Sets a figure of a device, or of all at -1, by its name in `nvml.rs`; -n lets its functions return NVML's error n,
/// such as -3 for "not supported". `driver` 0: the driver is not loaded. Returns 0, or 2 if there is no such name.
///
/// # Safety
/// `name` has to be null or a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fakecuda_nvml_set(device: i32, name: *const c_char, value: i64) -> i32 {
    if name.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: as the caller says, and it is not null.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    let is_known = all().set(u32::try_from(device).ok(), &name, value);
    status(if is_known { Ok(()) } else { Err(INVALID_ARGUMENT) })
}

#[cfg(test)]
mod tests;
