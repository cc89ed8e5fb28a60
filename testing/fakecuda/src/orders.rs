//! The order in which work is issued, guards of pinned memory, and who uses which device.

use std::ffi::c_char;

use crate::{Fake, text};

impl Fake {
    /// Sets whether to keep the order in which work is issued.
    pub fn keep_order(self, on: bool) {
        call!(c"fakecuda_keep_order"(on => bool) -> ());
    }

    /// What was issued since the last call, in order: names of kernels, copies and fills, and calls of NCCL as
    /// `nccl AllReduce of 8 Float32`.
    pub fn issued(self) -> Vec<String> {
        text(call!(c"fakecuda_issued"() -> *const c_char)).lines().map(str::to_owned).collect()
    }

    /// Sets whether to guard pinned memory, from the time when a copy of it is issued until the host has waited for the
    /// copy. A touch before that is among the [notes](Self::notes). False if the system cannot catch touches.
    pub fn guard_pinned(self, on: bool) -> bool {
        call!(c"fakecuda_guard"(on => bool) -> bool)
    }

    /// Whether this process has a context on a device.
    pub fn has_context(self, device: usize) -> bool {
        let device = u32::try_from(device).unwrap_or(u32::MAX);
        call!(c"fakecuda_has_context"(device => u32) -> bool)
    }

    /// The functions that made this process's context on a device, as [`waits`](Self::waits) tells them.
    pub fn context_origin(self, device: usize) -> String {
        let device = u32::try_from(device).unwrap_or(u32::MAX);
        text(call!(c"fakecuda_context_origin"(device => u32) -> *const c_char))
    }

    /// How many bytes of a device this process has allocated from the driver.
    pub fn used_bytes(self, device: usize) -> usize {
        let device = u32::try_from(device).unwrap_or(u32::MAX);
        call!(c"fakecuda_used_bytes"(device => u32) -> usize)
    }
}
