//! The declarations of `cpp/profiler.h`, line for line.

use std::ffi::c_char;

use crate::raw::{Error, Status};

macro_rules! opaque {
    ($($name:ident),*) => {$(
        #[repr(C)]
        pub struct $name {
            _opaque: [u8; 0],
        }
    )*};
}
opaque!(Trace, Scope, Events);

#[derive(Debug)]
#[repr(C)]
pub struct Options {
    pub cpu: i32,
    pub cuda: i32,
    pub record_shapes: i32,
    pub profile_memory: i32,
    pub with_flops: i32,
    pub overload_names: i32,
    pub trace_id: *const c_char,
}

#[repr(C)]
pub struct Event {
    pub start_ns: i64,
    pub end_ns: i64,
    pub correlation_id: u64,
    pub linked_correlation_id: u64,
    pub start_thread: u64,
    pub end_thread: u64,
    pub forward_thread: u64,
    pub sequence_number: i64,
    pub flops: u64,
    pub bytes: i64,
    pub resource: i64,
    pub inputs: u64,
    pub n_inputs: u32,
    pub name: u32,
    pub overload: u32,
    pub device_type: i32,
    pub device_index: i32,
    pub activity: u8,
    pub scope: u8,
    pub is_async: u8,
    pub is_hidden: u8,
}

#[repr(C)]
pub struct EventsView {
    pub events: *const Event,
    pub n_events: usize,
    pub inputs: *const i64,
    pub n_inputs: usize,
    pub text: *const u8,
    pub text_ends: *const u64,
    pub n_strings: usize,
}

unsafe extern "C" {
    pub fn od_profiler_prepare(options: *const Options, err: *mut Error) -> Status;
    pub fn od_profiler_enable(options: *const Options, err: *mut Error) -> Status;
    pub fn od_profiler_disable(out: *mut *mut Trace, err: *mut Error) -> Status;
    pub fn od_profiler_add_metadata(key: *const c_char, json: *const c_char, err: *mut Error) -> Status;
    pub fn od_trace_free(trace: *mut Trace);
    pub fn od_trace_start_ns(trace: *const Trace, out: *mut i64, err: *mut Error) -> Status;
    pub fn od_trace_save(trace: *mut Trace, path: *const c_char, err: *mut Error) -> Status;
    pub fn od_scope_enter(name: *const u8, length: usize, out: *mut *mut Scope, err: *mut Error) -> Status;
    pub fn od_scope_exit(scope: *mut Scope, err: *mut Error) -> Status;
    pub fn od_current_thread(number: *mut u64, system: *mut i64);

    pub fn od_trace_events(
        trace: *const Trace,
        out: *mut *mut Events,
        view: *mut EventsView,
        err: *mut Error,
    ) -> Status;
    pub fn od_events_free(events: *mut Events);
}
