//! What a test asks to fail.

use std::ffi::{CStr, c_char};

use super::control::kept;
use crate::error::CudaError;
use crate::faults::{Faults, Moment, change, planted};
use crate::nccl::communicator::cut_links;
use crate::world::{LAST_ERROR, world};

/// # Safety
/// `what` has to be null or a text that ends with a zero byte.
unsafe fn plan(what: *const c_char, nth: u64, code: i32, moment: Moment) {
    if !what.is_null() {
        // SAFETY: as the caller says.
        let what = unsafe { CStr::from_ptr(what) }.to_string_lossy();
        change(|faults| faults.plan(&what, nth, code, moment));
    }
}

/// The nth call from now of the C function of this name, or the nth piece of work (kernel, copy, fill) whose name
/// contains this text, returns this code. A call is found only in the linked libraries.
///
/// # Safety
/// `what` has to be null or a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fakecuda_fail(what: *const c_char, nth: u64, code: i32) {
    // SAFETY: as the caller says.
    unsafe { plan(what, nth, code, Moment::Issued) }
}

/// The nth piece of work whose name contains this text fails when it runs: the host learns of it when it next waits.
///
/// # Safety
/// As `fakecuda_fail`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fakecuda_fail_later(what: *const c_char, nth: u64, code: i32) {
    // SAFETY: as the caller says.
    unsafe { plan(what, nth, code, Moment::Run) }
}

/// From now on calls of the C function of this name do nothing and succeed: those whose first argument is 0 (`first`: 1),
/// is another (2), or all of them.
///
/// # Safety
/// As `fakecuda_fail`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fakecuda_leave_out(what: *const c_char, first: i32) {
    if !what.is_null() {
        // SAFETY: as the caller says.
        let what = unsafe { CStr::from_ptr(what) }.to_string_lossy();
        let of_zero = (first == 1 || first == 2).then_some(first == 1);
        change(|faults| faults.leave_out(&what, of_zero));
    }
}

/// A device is not there any more: each call on it returns this code. At 0 that is `cudaErrorDevicesUnavailable`;
/// CUDA's documentation does not say which code a GPU that fell off the bus gives.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_lose(device: u32, code: i32) {
    let error = if code == 0 { CudaError::DEVICES_UNAVAILABLE } else { CudaError(code) };
    change(|faults| faults.lose(device as usize, error));
}

/// The failures that were planted and not met yet, a line each.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_planted() -> *const c_char {
    kept(&planted().iter().map(|it| format!("{}\n", it.replace('\n', " "))).collect::<String>())
}

/// Forgets all planted failures, and those that happened. No real process recovers from a sticky error: this is for
/// tests that share one.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_heal() {
    change(|faults| *faults = Faults::default());
    LAST_ERROR.set(0);
}

/// The messages of NCCL from and to this process stop arriving, and it lives on.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_cut_links() {
    cut_links();
}

/// Lets a device have only so many bytes.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_limit(device: u32, bytes: usize) -> i32 {
    let mut world = world();
    match world.devices.get_mut(device as usize) {
        Some(device) => {
            device.memory.set_limit(bytes);
            0
        }
        None => CudaError::INVALID_DEVICE.0,
    }
}
