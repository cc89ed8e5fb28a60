//! The declarations of `cpp/side_stream.h`, line for line.

use torch_sys::C_tensor;

use crate::raw::{Error, Status};

#[repr(C)]
pub struct SideStream {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct Transfer {
    _opaque: [u8; 0],
}

unsafe extern "C" {
    pub fn od_side_stream_new(device: i32, out: *mut *mut SideStream, err: *mut Error) -> Status;
    pub fn od_side_stream_free(side: *mut SideStream);
    pub fn od_side_stream_synchronize(side: *const SideStream, err: *mut Error) -> Status;
    pub fn od_side_stream_copy(
        side: *const SideStream,
        from: *const C_tensor,
        to: *const C_tensor,
        out: *mut *mut Transfer,
        err: *mut Error,
    ) -> Status;
    pub fn od_transfer_tensor(transfer: *mut Transfer, out: *mut *mut C_tensor, err: *mut Error) -> Status;
    pub fn od_transfer_free(transfer: *mut Transfer);
}
