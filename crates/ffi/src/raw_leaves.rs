//! The declarations of `cpp/leaves.h`, line for line.

use torch_sys::C_tensor;

use crate::raw::{Error, Status};

#[repr(C)]
pub struct Leaves {
    _opaque: [u8; 0],
}

unsafe extern "C" {
    pub fn od_leaves_new(out: *mut *mut Leaves, err: *mut Error) -> Status;
    pub fn od_leaves_see(leaves: *mut Leaves, tensor: *const C_tensor, err: *mut Error) -> Status;
    pub fn od_leaves_finish(leaves: *mut Leaves);
    pub fn od_leaves_changed(leaves: *const Leaves, out: *mut *mut C_tensor, err: *mut Error) -> Status;
    pub fn od_leaves_free(leaves: *mut Leaves);
}
