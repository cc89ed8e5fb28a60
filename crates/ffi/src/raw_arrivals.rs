//! The declarations of `cpp/arrivals.h`, line for line.

use crate::raw::{Error, Status};
use crate::raw_side_stream::Transfer;

#[repr(C)]
pub struct Arrivals {
    _opaque: [u8; 0],
}

unsafe extern "C" {
    pub fn od_arrivals_new(
        transfers: *const *mut Transfer,
        n: usize,
        out: *mut *mut Arrivals,
        err: *mut Error,
    ) -> Status;
    pub fn od_arrivals_finish(arrivals: *mut Arrivals, used: *mut usize, n_used: *mut usize, err: *mut Error)
    -> Status;
    pub fn od_arrivals_free(arrivals: *mut Arrivals);
}
