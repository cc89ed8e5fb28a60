//! The declarations of `cpp/on_demand.h`, line for line.

use std::ffi::c_char;

use torch_sys::C_tensor;

use crate::raw::{Error, Status};

unsafe extern "C" {
    pub fn od_on_demand_new(
        tensor: *const C_tensor,
        scalar_type: i32,
        bytes: usize,
        message: *const c_char,
        err: *mut Error,
    ) -> Status;
    pub fn od_on_demand_fill(
        tensor: *const C_tensor,
        from: *const C_tensor,
        message: *const c_char,
        err: *mut Error,
    ) -> Status;
    pub fn od_on_demand_free(tensor: *const C_tensor, message: *const c_char, err: *mut Error) -> Status;
}
