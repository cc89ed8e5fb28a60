//! What happens before a C function: it may have to fail, and its call may have to be recorded.
//!
//! `entries.rs` of the package that links the libraries puts a few instructions before each function, which call
//! [`fakecuda_enter`] when [`fakecuda_watched`] is not 0.

use std::ffi::{CStr, c_char};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::world::{CURRENT, LAST_ERROR, world};
use crate::{faults, trace};

/// Failures are planted, or the environment has not been asked for them yet.
pub const FAULTS: u32 = 1;
/// CUPTI records what happens.
pub const TRACE: u32 = 2;

/// Who wants to know of calls: [`FAULTS`] and [`TRACE`].
#[allow(non_upper_case_globals, reason = "the name that the entries know it by")]
#[unsafe(no_mangle)]
pub static fakecuda_watched: AtomicU32 = AtomicU32::new(FAULTS);

/// What a call that is left out returns to the entry, which returns 0 to the program (`entries.rs`).
pub const LEFT_OUT: i32 = i32::MIN;

/// Whether one of these wants to know.
pub fn is_watched(by: u32) -> bool {
    fakecuda_watched.load(Ordering::Relaxed) & by != 0
}

/// From now on, one of these wants to know, or not.
pub fn watch(by: u32, on: bool) {
    if on {
        fakecuda_watched.fetch_or(by, Ordering::Relaxed);
    } else {
        fakecuda_watched.fetch_and(!by, Ordering::Relaxed);
    }
}

/// The status that a call has to return without being made, [`LEFT_OUT`] for 0; 0: it is made. `argument`: its first one, if it has any.
///
/// # Safety
/// `name` has to be a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fakecuda_enter(name: *const c_char, argument: usize) -> i32 {
    // SAFETY: as the caller says.
    let Ok(name) = unsafe { CStr::from_ptr(name) }.to_str() else { return 0 };
    let status = if is_watched(FAULTS) { faults::of_call(name, argument, CURRENT.get()) } else { 0 };
    if is_watched(TRACE) {
        trace::call(name, argument, if status == LEFT_OUT { 0 } else { status });
    }
    if status == LEFT_OUT {
        world().count(&format!("left out: {name}"), 1);
    } else if status != 0 {
        world().count(&format!("failed {}", name.trim_start_matches('_')), 1);
        if name.trim_start_matches('_').starts_with("cuda") {
            LAST_ERROR.set(status);
        }
    }
    status
}
