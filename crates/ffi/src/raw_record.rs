//! The declarations of `cpp/record.h`, line for line.

use std::ffi::{c_char, c_void};
use torch_sys::C_tensor;

use crate::raw::{Error, Status, TensorList};

#[repr(C)]
pub struct Recorder {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct Package {
    _opaque: [u8; 0],
}

pub const IN_MEMORY: i32 = 0;
pub const UNDEFINED: i32 = 1;
pub const LAZY: i32 = 3;

pub const WRITTEN: i32 = 1;
pub const NOTICED: i32 = 2;

unsafe extern "C" {
    pub fn od_record_start(
        owner: *mut c_void,
        on_operator: extern "C" fn(*mut c_void),
        on_refusal: extern "C" fn(*mut c_void, *const c_char),
        drop: extern "C" fn(*mut c_void),
        out: *mut *mut Recorder,
        err: *mut Error,
    ) -> Status;
    pub fn od_record_stop(recorder: *mut Recorder);
    pub fn od_record_free(recorder: *mut Recorder);
    pub fn od_record_number(recorder: *mut Recorder, tensor: *const C_tensor, out: *mut i64, err: *mut Error)
    -> Status;
    pub fn od_record_add_input(recorder: *mut Recorder, tensor: *const C_tensor, err: *mut Error) -> Status;
    pub fn od_record_writes_to(
        recorder: *mut Recorder,
        tensor: *const C_tensor,
        out: *mut i32,
        err: *mut Error,
    ) -> Status;
    pub fn od_record_externals(recorder: *mut Recorder, out: *mut *mut TensorList, err: *mut Error) -> Status;
    pub fn od_record_operators(recorder: *mut Recorder, out: *mut *mut c_char, err: *mut Error) -> Status;

    pub fn od_package_load(path: *const c_char, device_index: i32, out: *mut *mut Package, err: *mut Error) -> Status;
    pub fn od_package_run(
        package: *mut Package,
        inputs: *const TensorList,
        out: *mut *mut TensorList,
        err: *mut Error,
    ) -> Status;
    pub fn od_package_least_size(package: *mut Package, out: *mut i64, err: *mut Error) -> Status;
    pub fn od_package_free(package: *mut Package);
    pub fn od_tensor_values(tensor: *const C_tensor) -> i32;
    pub fn od_tensors_share_memory(one: *const C_tensor, other: *const C_tensor) -> i32;
    pub fn od_tensor_memory(tensor: *const C_tensor) -> *const c_void;
    pub fn od_tensor_address(tensor: *const C_tensor) -> *const c_void;
    pub fn od_tensor_bump_version(tensor: *const C_tensor);
}
