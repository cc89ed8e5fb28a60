//! The declarations of `cpp/keep.h`, line for line.

use std::ffi::{c_char, c_void};

use crate::raw::{Error, Status};

#[repr(C)]
pub struct Keeper {
    _opaque: [u8; 0],
}

unsafe extern "C" {
    pub fn od_keeper_new(
        owner: *mut c_void,
        keeps: extern "C" fn(*mut c_void, usize, *const c_char, *const c_char) -> i32,
        ran: Option<extern "C" fn(*mut c_void, u64, *const c_void, usize)>,
        drop: extern "C" fn(*mut c_void),
        out: *mut *mut Keeper,
        err: *mut Error,
    ) -> Status;
    pub fn od_keeper_begin(keeper: *mut Keeper, reuse: i32, err: *mut Error) -> Status;
    pub fn od_keeper_end(keeper: *mut Keeper);
    pub fn od_keeper_need(keeper: *mut Keeper);
    pub fn od_keeper_bytes(keeper: *mut Keeper) -> usize;
    pub fn od_keeper_finish(keeper: *mut Keeper);
    pub fn od_keeper_free(keeper: *mut Keeper);
}
