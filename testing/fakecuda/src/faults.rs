//! Failures that a test plants, and the figures that NVML reports.

use std::ffi::{CStr, CString, c_char};

use crate::runtime::Code;
use crate::{Fake, text};

/// Which calls of a function, chosen by their first argument. For functions of a stream, 0 is the default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calls {
    /// All of them.
    All,
    /// Those with 0.
    Zero,
    /// Those with another.
    Others,
}

impl Fake {
    /// The nth call of this C function (`cudaMalloc`) from now on, or the nth kernel, copy or fill whose name contains
    /// this text, returns this code; 1 is the next one. Functions are found on x86-64 only.
    pub fn fail(self, what: &str, nth: u64, code: Code) {
        let what = c_text(what);
        call!(c"fakecuda_fail"(what.as_ptr() => *const c_char, nth => u64, code => i32) -> ());
    }

    /// The nth kernel, copy or fill whose name contains this text fails when it runs. The host learns of it when it
    /// next waits.
    pub fn fail_later(self, what: &str, nth: u64, code: Code) {
        let what = c_text(what);
        call!(c"fakecuda_fail_later"(what.as_ptr() => *const c_char, nth => u64, code => i32) -> ());
    }

    /// From now on these calls of this C function (`cudaStreamWaitEvent`) do nothing and succeed, as if the program had
    /// forgotten them. Functions are found on x86-64 only.
    pub fn leave_out(self, what: &str, calls: Calls) {
        let what = c_text(what);
        call!(c"fakecuda_leave_out"(what.as_ptr() => *const c_char, calls as i32 => i32) -> ());
    }

    /// The planted failures that have not happened yet, a line each, including those of functions and devices that do
    /// not exist, and calls to skip that were not made. A test in which everything planted has happened ends with none.
    pub fn planted(self) -> Vec<String> {
        text(call!(c"fakecuda_planted"() -> *const c_char)).lines().map(str::to_owned).collect()
    }

    /// From now on each call on this device fails with the code; 0 stands for `cudaErrorDevicesUnavailable`.
    pub fn lose(self, device: usize, code: Code) {
        call!(c"fakecuda_lose"(number(device) => u32, code => i32) -> ());
    }

    /// Forgets all failures, those that are planted and those that have happened. No real process can recover from a
    /// lost device.
    pub fn heal(self) {
        call!(c"fakecuda_heal"() -> ());
    }

    /// From now on no message of NCCL reaches this process or leaves it, although it stays alive.
    pub fn cut_links(self) {
        call!(c"fakecuda_cut_links"() -> ());
    }

    /// Limits the memory of a device to so many bytes. False if there is no such device.
    pub fn limit(self, device: usize, bytes: usize) -> bool {
        call!(c"fakecuda_limit"(number(device) => u32, bytes => usize) -> i32) == 0
    }

    /// Sets a figure that NVML reports of a device (`temperature`, `sm_clock`, `throttle_reasons`, ..), in NVML's
    /// units; -n makes it fail with NVML's error n. False if there is no such figure.
    pub fn set_nvml(self, device: usize, figure: &str, value: i64) -> bool {
        let figure = c_text(figure);
        let device = i32::try_from(device).unwrap_or(i32::MAX);
        call!(c"fakecuda_nvml_set"(device => i32, figure.as_ptr() => *const c_char, value => i64) -> i32) == 0
    }

    /// While work does not run at once: how many queries in a row may report work that is not done, before it runs.
    pub fn set_polls(self, polls: u64) {
        call!(c"fakecuda_polls"(polls => u64) -> ());
    }
}

fn number(device: usize) -> u32 {
    u32::try_from(device).unwrap_or(u32::MAX)
}

/// Up to the first zero byte.
fn c_text(text: &str) -> CString {
    let bytes = text.bytes().take_while(|&byte| byte != 0).chain([0]).collect::<Vec<u8>>();
    CStr::from_bytes_with_nul(&bytes).map(CStr::to_owned).unwrap_or_default()
}
