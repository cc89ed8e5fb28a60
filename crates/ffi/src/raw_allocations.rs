//! The declarations of `cpp/allocations.h`, line for line.

use std::ffi::c_void;

use crate::raw::{Error, Status};

#[repr(C)]
pub struct Watch {
    _opaque: [u8; 0],
}

pub const ALLOCATED: i32 = 0;
pub const FREED: i32 = 1;
pub const BACKWARD_BEGINS: i32 = 2;
pub const BACKWARD_ENDS: i32 = 3;

unsafe extern "C" {
    pub fn od_watch_begin(
        owner: *mut c_void,
        on_event: extern "C" fn(owner: *mut c_void, event: i32, address: u64, bytes: u64, device: i32),
        drop: extern "C" fn(*mut c_void),
        out: *mut *mut Watch,
        err: *mut Error,
    ) -> Status;
    pub fn od_watch_end(watch: *mut Watch);
}
