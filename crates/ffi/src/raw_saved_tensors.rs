//! The declarations of `cpp/saved_tensors.h`, line for line.

use std::ffi::c_void;
use torch_sys::C_tensor;

use crate::raw::{Error, Status};

#[repr(C)]
pub struct SavedHooks {
    pub owner: *mut c_void,
    pub pack: extern "C" fn(
        owner: *mut c_void,
        tensor: *const C_tensor,
        packed: *mut *mut c_void,
        panic: *mut *mut c_void,
        err: *mut Error,
    ) -> Status,
    pub unpack:
        extern "C" fn(packed: *mut c_void, out: *mut *mut C_tensor, panic: *mut *mut c_void, err: *mut Error) -> Status,
    pub drop: extern "C" fn(*mut c_void),
    pub drop_packed: extern "C" fn(*mut c_void),
    pub drop_panic: extern "C" fn(*mut c_void),
}

#[repr(C)]
pub struct SameTensor {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct SavedTensor {
    _opaque: [u8; 0],
}

unsafe extern "C" {
    pub fn od_saved_hooks_push(hooks: *const SavedHooks, number: *mut u64, err: *mut Error) -> Status;
    pub fn od_saved_hooks_pop(number: u64);
    pub fn od_saved_tensor_new(tensor: *const C_tensor, out: *mut *mut SavedTensor, err: *mut Error) -> Status;
    pub fn od_saved_tensor_unpack(
        saved: *const SavedTensor,
        out: *mut *mut C_tensor,
        panic: *mut *mut c_void,
        err: *mut Error,
    ) -> Status;
    pub fn od_saved_tensor_free(saved: *mut SavedTensor);
    pub fn od_backward_pass() -> i64;
    pub fn od_keep_for_pass(owner: *mut c_void, drop: extern "C" fn(*mut c_void), err: *mut Error) -> Status;
    pub fn od_tensor_data(tensor: *const C_tensor, out: *mut *mut C_tensor, err: *mut Error) -> Status;
    pub fn od_tensor_is_parameter(tensor: *const C_tensor) -> i32;
    pub fn od_tensor_is_relu_saving(tensor: *const C_tensor) -> i32;
    pub fn od_same_tensor_new(tensor: *const C_tensor, out: *mut *mut SameTensor, err: *mut Error) -> Status;
    pub fn od_same_tensor_is(same: *const SameTensor, tensor: *const C_tensor) -> i32;
    pub fn od_same_tensor_free(same: *mut SameTensor);
    pub fn od_tensor_set_version(tensor: *const C_tensor, version: i64, err: *mut Error) -> Status;
    pub fn od_tensor_version(tensor: *const C_tensor) -> i64;
}
