//! The declarations of `cpp/overdrive.h`, line for line.

use std::ffi::{c_char, c_void};
use torch_sys::C_tensor;

pub type Status = i32;
pub const OK: Status = 0;
pub const OUT_OF_MEMORY: Status = 1;
pub const CUDA: Status = 2;
pub const DISTRIBUTED: Status = 3;
pub const OTHER: Status = 4;
pub const TIMEOUT: Status = 5;
pub const IO: Status = 6;

pub const NONE: i32 = 0;
pub const BOOL: i32 = 1;
pub const INT: i32 = 2;
pub const DOUBLE: i32 = 3;
pub const TENSOR: i32 = 4;
pub const TENSOR_LIST: i32 = 5;
pub const INT_LIST: i32 = 6;
pub const SCALAR_LIST: i32 = 7;

#[repr(C)]
pub struct Error {
    pub message: *mut c_char,
    pub detail: *mut c_char,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Value {
    pub tag: i32,
    pub integer: i64,
    pub real: f64,
    pub pointer: *const c_void,
}

#[repr(C)]
pub struct Op {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct TensorList {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct CopyStream {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct CopyEvent {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct TimedEvent {
    _opaque: [u8; 0],
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AutocastState {
    pub device_type: i32,
    pub enabled: i32,
    pub scalar_type: i32,
    pub cache_enabled: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct MemoryStats {
    pub allocated_bytes: i64,
    pub allocated_peak_bytes: i64,
    pub reserved_bytes: i64,
    pub reserved_peak_bytes: i64,
    pub alloc_retries: i64,
}

#[cfg(feature = "libjpeg-turbo")]
#[repr(C)]
pub struct JpegPart {
    pub top: u32,
    pub left: u32,
    pub height: u32,
    pub width: u32,
    pub eighths: u32,
    pub channels: u32,
}

#[repr(C)]
pub struct AdamW {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub step: f64,
    pub maximize: i32,
}

#[repr(C)]
pub struct Storage {
    pub owners: usize,
    pub data: *mut u8,
    pub bytes: usize,
}

#[repr(C)]
#[derive(Debug)]
pub struct Node {
    _opaque: [u8; 0],
}

#[repr(C)]
#[derive(Default)]
pub struct HostMemory {
    pub allocated: u64,
    pub peak: u64,
    pub allocations: u64,
    pub refused: u64,
}

#[repr(C)]
pub struct Function {
    pub name: *const c_char,
    pub materialize_grads: i32,
    pub once_differentiable: i32,
    pub inputs: *const TensorList,
    pub outputs: *const TensorList,
    pub saved: *const TensorList,
    pub dirty: *const TensorList,
    pub non_differentiable: *const TensorList,
    pub owner: *mut c_void,
    pub backward: extern "C" fn(
        owner: *mut c_void,
        node: *const Node,
        grads: *mut TensorList,
        out: *mut *mut TensorList,
        panic: *mut *mut c_void,
        err: *mut Error,
    ) -> Status,
    pub drop: extern "C" fn(*mut c_void),
    pub drop_panic: extern "C" fn(*mut c_void),
}

#[repr(C)]
pub struct GradOptions {
    pub retain_graph: i32,
    pub create_graph: i32,
    pub allow_unused: i32,
    pub accumulate: i32,
}

unsafe extern "C" {
    pub fn od_error_clear(err: *mut Error);
    pub fn od_error_set(err: *mut Error, message: *const c_char);
    pub fn od_test_throw(what: i32, err: *mut Error) -> Status;

    pub fn od_op_find(name: *const c_char, overload: *const c_char, out: *mut *const Op, err: *mut Error) -> Status;
    pub fn od_op_call(
        op: *const Op,
        fused: i32,
        args: *const Value,
        n_args: usize,
        results: *mut Value,
        max_results: usize,
        n_results: *mut usize,
        err: *mut Error,
    ) -> Status;

    pub fn od_tensor_list_new(
        tensors: *const *const C_tensor,
        n: usize,
        out: *mut *mut TensorList,
        err: *mut Error,
    ) -> Status;
    pub fn od_tensor_list_share(list: *const TensorList, out: *mut *mut TensorList, err: *mut Error) -> Status;
    pub fn od_tensor_list_free(list: *mut TensorList);
    pub fn od_tensor_list_len(list: *const TensorList) -> usize;
    pub fn od_tensor_id(tensor: *const C_tensor) -> usize;
    pub fn od_tensor_list_writes(list: *const TensorList, out: *mut u64, err: *mut Error) -> Status;
    pub fn od_tensor_list_get(
        list: *const TensorList,
        index: usize,
        out: *mut *mut C_tensor,
        err: *mut Error,
    ) -> Status;
    pub fn od_tensor_list_grads(
        list: *const TensorList,
        like_params: i32,
        defined: *mut u8,
        n_defined: *mut usize,
        out: *mut *mut TensorList,
        err: *mut Error,
    ) -> Status;
    pub fn od_tensor_list_sparse_grad(list: *const TensorList, index: *mut usize, err: *mut Error) -> Status;
    pub fn od_tensor_list_clear_grads(list: *const TensorList, err: *mut Error) -> Status;
    pub fn od_tensor_take_grad(tensor: *const C_tensor, out: *mut *mut C_tensor, err: *mut Error) -> Status;
    pub fn od_tensor_set_grad(tensor: *const C_tensor, grad: *const C_tensor, err: *mut Error) -> Status;
    pub fn od_tensor_list_select(
        list: *const TensorList,
        keep: *const u8,
        out: *mut *mut TensorList,
        err: *mut Error,
    ) -> Status;

    pub fn od_autocast_get(device_type: i32, out: *mut AutocastState, err: *mut Error) -> Status;
    pub fn od_autocast_enter(wanted: *const AutocastState, previous: *mut AutocastState, err: *mut Error) -> Status;
    pub fn od_autocast_exit(previous: *const AutocastState, err: *mut Error) -> Status;

    pub fn od_host_cache_limit(bytes: usize, err: *mut Error) -> Status;
    pub fn od_host_cache_held(out: *mut usize, err: *mut Error) -> Status;
    pub fn od_host_memory_count(limit: usize, err: *mut Error) -> Status;
    pub fn od_host_memory_stats(out: *mut HostMemory, err: *mut Error) -> Status;
    pub fn od_host_memory_reset_peak(err: *mut Error) -> Status;
    pub fn od_host_memory_trim();
    pub fn od_host_memory_install(err: *mut Error) -> Status;
    pub fn od_host_memory_in_folder(folder: i32) -> i32;
    pub fn od_host_memory_read_ahead(data: *const std::ffi::c_void, bytes: usize);

    pub fn od_empty_pinned(
        shape: *const i64,
        n_dims: usize,
        scalar_type: i32,
        out: *mut *mut C_tensor,
        err: *mut Error,
    ) -> Status;
    pub fn od_tensor_from_memory(
        data: *mut c_void,
        shape: *const i64,
        n_dims: usize,
        scalar_type: i32,
        owner: *mut c_void,
        drop: extern "C" fn(*mut c_void),
        out: *mut *mut C_tensor,
        err: *mut Error,
    ) -> Status;

    pub fn od_host_buffer(
        bytes: i64,
        pinned: i32,
        out: *mut *mut C_tensor,
        data: *mut *mut u8,
        err: *mut Error,
    ) -> Status;

    pub fn od_storage_state(tensor: *const C_tensor, out: *mut Storage, err: *mut Error) -> Status;

    pub fn od_grad_enabled() -> i32;
    pub fn od_use_one_thread(used: *mut i32, err: *mut Error) -> Status;

    pub fn od_gather_rows(
        source: *const C_tensor,
        rows: *const i64,
        n_rows: usize,
        pinned: i32,
        out: *mut *mut C_tensor,
        err: *mut Error,
    ) -> Status;

    pub fn od_matmul_allow_tf32(out: *mut i32, err: *mut Error) -> Status;
    pub fn od_set_matmul_allow_tf32(allow: i32, err: *mut Error) -> Status;
    pub fn od_cudnn_allow_tf32(out: *mut i32, err: *mut Error) -> Status;
    pub fn od_set_cudnn_allow_tf32(allow: i32, err: *mut Error) -> Status;

    pub fn od_grad_hook_set(
        tensor: *const C_tensor,
        owner: *mut c_void,
        call: extern "C" fn(*mut c_void),
        drop: extern "C" fn(*mut c_void),
        idle: extern "C" fn(*mut c_void) -> i32,
        err: *mut Error,
    ) -> Status;

    pub fn od_function_record(function: *const Function, out: *mut *mut TensorList, err: *mut Error) -> Status;
    pub fn od_node_saved(node: *const Node, out: *mut *mut TensorList, err: *mut Error) -> Status;
    pub fn od_node_needs_input_grad(node: *const Node, index: usize, out: *mut i32, err: *mut Error) -> Status;
    pub fn od_grad(
        outputs: *const TensorList,
        inputs: *const TensorList,
        grad_outputs: *const TensorList,
        options: *const GradOptions,
        out: *mut *mut TensorList,
        panic: *mut *mut c_void,
        err: *mut Error,
    ) -> Status;

    pub fn od_dynamic_map(is_signed: i32, codes: *mut f32);
    pub fn od_adamw8bit(
        param: *const C_tensor,
        grad: *const C_tensor,
        codes1: *const C_tensor,
        scales1: *const C_tensor,
        codes2: *const C_tensor,
        scales2: *const C_tensor,
        options: *const AdamW,
        err: *mut Error,
    ) -> Status;

    pub fn od_rng_state(device_type: i32, index: i32, out: *mut *mut C_tensor, err: *mut Error) -> Status;
    pub fn od_cuda_used(devices: *mut u64, err: *mut Error) -> Status;
    pub fn od_set_rng_state(device_type: i32, index: i32, state: *const C_tensor, err: *mut Error) -> Status;

    pub fn od_cuda_compiled() -> i32;
    pub fn od_cuda_device_name(device: i32, out: *mut *mut c_char, err: *mut Error) -> Status;
    pub fn od_cuda_device_uuid(device: i32, out: *mut u8, err: *mut Error) -> Status;
    pub fn od_cuda_device_capability(device: i32, major: *mut i32, minor: *mut i32, err: *mut Error) -> Status;
    pub fn od_string_free(string: *mut c_char);
    pub fn od_cuda_memory_stats(device: i32, out: *mut MemoryStats, err: *mut Error) -> Status;
    pub fn od_cuda_reset_peak_memory_stats(device: i32, err: *mut Error) -> Status;
    pub fn od_cuda_empty_cache(err: *mut Error) -> Status;
    pub fn od_cuda_set_memory_fraction(device: i32, fraction: f64, err: *mut Error) -> Status;
    pub fn od_cuda_record_memory_history(enabled: i32, err: *mut Error) -> Status;
    pub fn od_cuda_memory_snapshot(out: *mut *mut C_tensor, err: *mut Error) -> Status;
    pub fn od_cuda_set_allocator_settings(settings: *const c_char, err: *mut Error) -> Status;
    pub fn od_cuda_set_sync_debug_mode(mode: i32, previous: *mut i32, err: *mut Error) -> Status;

    pub fn od_copy_stream_new(device: i32, out: *mut *mut CopyStream, err: *mut Error) -> Status;
    pub fn od_copy_stream_free(stream: *mut CopyStream);
    pub fn od_copy_stream_upload(
        stream: *const CopyStream,
        host: *const C_tensor,
        out: *mut *mut C_tensor,
        err: *mut Error,
    ) -> Status;
    pub fn od_copy_stream_record(stream: *const CopyStream, out: *mut *mut CopyEvent, err: *mut Error) -> Status;
    pub fn od_copy_stream_end_batch(stream: *const CopyStream, err: *mut Error) -> Status;
    pub fn od_copy_event_wait(event: *mut CopyEvent, begins_batch: i32, err: *mut Error) -> Status;
    pub fn od_copy_event_free(event: *mut CopyEvent);
    pub fn od_copy_event_adopt(event: *const CopyEvent, tensor: *const C_tensor, err: *mut Error) -> Status;

    pub fn od_timed_event_new(device: i32, out: *mut *mut TimedEvent, err: *mut Error) -> Status;
    pub fn od_timed_event_free(event: *mut TimedEvent);
    pub fn od_timed_event_record(event: *mut TimedEvent, err: *mut Error) -> Status;
    pub fn od_timed_event_is_reached(event: *const TimedEvent, out: *mut i32, err: *mut Error) -> Status;
    pub fn od_timed_event_elapsed(
        from: *const TimedEvent,
        to: *const TimedEvent,
        milliseconds: *mut f64,
        err: *mut Error,
    ) -> Status;
    #[cfg(feature = "libjpeg-turbo")]
    pub fn od_jpeg_decode(
        file: *const u8,
        bytes: usize,
        part: *const JpegPart,
        pixels: *mut u8,
        err: *mut Error,
    ) -> Status;
}
