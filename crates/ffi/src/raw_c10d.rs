//! The declarations of `cpp/c10d.h`, line for line.

use std::ffi::{c_char, c_void};
use torch_sys::C_tensor;

use crate::raw::{Error, Status, TensorList};

pub const GLOO: i32 = 1;
pub const NCCL: i32 = 2;
pub const GLOO_AND_NCCL: i32 = 3;

macro_rules! opaque {
    ($($name:ident),*) => {$(
        #[repr(C)]
        pub struct $name {
            _opaque: [u8; 0],
        }
    )*};
}
opaque!(Store, Group, Work, Reducer, MemPool);

#[repr(C)]
pub struct TcpStore {
    pub host: *const c_char,
    pub port: u16,
    pub is_server: i32,
    pub socket: i32,
    pub world_size: i64,
    pub wait_workers: i32,
    pub connect_ms: i64,
    pub timeout_ms: i64,
}

#[repr(C)]
pub struct GroupOptions {
    pub backend: i32,
    pub rank: i32,
    pub size: i32,
    pub name: *const c_char,
    pub global_ranks: *const u64,
    pub verify: i32,
    pub cuda_device: i32,
    pub one_host: i32,
    pub timeout_ms: i64,
    pub high_priority: i32,
    pub split_from: *const Group,
    pub color: i32,
}

pub const ALL_REDUCE: i32 = 0;
pub const ALL_REDUCE_COALESCED: i32 = 1;
pub const REDUCE: i32 = 2;
pub const BROADCAST: i32 = 3;
pub const ALL_GATHER: i32 = 4;
pub const ALL_GATHER_INTO: i32 = 5;
pub const REDUCE_SCATTER: i32 = 6;
pub const REDUCE_SCATTER_INTO: i32 = 7;
pub const GATHER: i32 = 8;
pub const SCATTER: i32 = 9;
pub const ALL_TO_ALL: i32 = 10;
pub const ALL_TO_ALL_SINGLE: i32 = 11;
pub const SEND: i32 = 12;
pub const RECV: i32 = 13;
pub const RECV_ANY: i32 = 14;
pub const BARRIER: i32 = 15;

#[repr(C)]
pub struct Collective {
    pub kind: i32,
    pub reduce_op: i32,
    pub factor: f64,
    pub peer: i32,
    pub tag: i32,
    pub timeout_ms: i64,
    pub inputs: *const TensorList,
    pub outputs: *const TensorList,
    pub input_splits: *const i64,
    pub output_splits: *const i64,
}

#[repr(C)]
pub struct Bucket {
    pub index: usize,
    pub is_last: i32,
    pub buffer: *mut C_tensor,
    pub gradients: *mut TensorList,
    pub parameters: *mut TensorList,
    pub earlier: *mut TensorList,
}

#[repr(C)]
pub struct ReducerOptions {
    pub bucket_bytes: i64,
    pub first_bucket_bytes: i64,
    pub default_buckets: i32,
    pub bucket_list: *const i64,
    pub bucket_list_length: usize,
    pub skip_unused: i32,
    pub find_unused_parameters: i32,
    pub gradient_as_bucket_view: i32,
    pub static_graph: i32,
    pub broadcast_buffers: i32,
    pub low_dtype: i32,
    pub frozen: *const TensorList,
}

pub type Visit = extern "C" fn(*mut c_void, *const u8, usize);

unsafe extern "C" {
    pub fn od_tcp_store_new(options: *const TcpStore, out: *mut *mut Store, err: *mut Error) -> Status;
    pub fn od_file_store_new(
        path: *const c_char,
        world_size: i32,
        timeout_ms: i64,
        out: *mut *mut Store,
        err: *mut Error,
    ) -> Status;
    pub fn od_hash_store_new(out: *mut *mut Store, err: *mut Error) -> Status;
    pub fn od_prefix_store_new(
        prefix: *const c_char,
        inner: *const Store,
        out: *mut *mut Store,
        err: *mut Error,
    ) -> Status;
    pub fn od_store_free(store: *mut Store);
    pub fn od_store_set(
        store: *const Store,
        key: *const c_char,
        value: *const u8,
        bytes: usize,
        err: *mut Error,
    ) -> Status;
    pub fn od_store_get(
        store: *const Store,
        key: *const c_char,
        timeout_ms: i64,
        visitor: *mut c_void,
        visit: Visit,
        err: *mut Error,
    ) -> Status;
    pub fn od_store_compare_set(
        store: *const Store,
        key: *const c_char,
        expected: *const u8,
        expected_bytes: usize,
        value: *const u8,
        bytes: usize,
        visitor: *mut c_void,
        visit: Visit,
        err: *mut Error,
    ) -> Status;
    pub fn od_store_add(store: *const Store, key: *const c_char, amount: i64, out: *mut i64, err: *mut Error)
    -> Status;
    pub fn od_store_check(
        store: *const Store,
        keys: *const *const c_char,
        n: usize,
        out: *mut i32,
        err: *mut Error,
    ) -> Status;
    pub fn od_store_wait(
        store: *const Store,
        keys: *const *const c_char,
        n: usize,
        timeout_ms: i64,
        err: *mut Error,
    ) -> Status;
    pub fn od_store_delete(store: *const Store, key: *const c_char, deleted: *mut i32, err: *mut Error) -> Status;

    pub fn od_nccl_compiled() -> i32;
    pub fn od_group_new(
        store: *const Store,
        options: *const GroupOptions,
        out: *mut *mut Group,
        err: *mut Error,
    ) -> Status;
    pub fn od_group_free(group: *mut Group, timeout_ms: i64);
    pub fn od_group_split_none(group: *const Group, device: i32, err: *mut Error) -> Status;
    pub fn od_mem_pool_new(device: i32, nccl: *const Group, out: *mut *mut MemPool, err: *mut Error) -> Status;
    pub fn od_mem_pool_free(pool: *mut MemPool);
    pub fn od_mem_pool_begin(pool: *const MemPool, err: *mut Error) -> Status;
    pub fn od_mem_pool_end(pool: *const MemPool);
    pub fn od_group_register_pool(group: *const Group, pool: *const MemPool, err: *mut Error) -> Status;
    pub fn od_group_deregister_pool(group: *const Group, pool: *const MemPool, err: *mut Error) -> Status;
    pub fn od_group_close(group: *const Group, timeout_ms: i64, err: *mut Error) -> Status;
    pub fn od_group_monitored_barrier(
        group: *const Group,
        timeout_ms: i64,
        wait_all_ranks: i32,
        err: *mut Error,
    ) -> Status;
    pub fn od_group_broadcast_coalesced(
        group: *const Group,
        tensors: *const TensorList,
        bytes: i64,
        root: i32,
        err: *mut Error,
    ) -> Status;
    pub fn od_group_verify_params(group: *const Group, params: *const TensorList, err: *mut Error) -> Status;
    pub fn od_group_set_timeout(group: *const Group, timeout_ms: i64, err: *mut Error) -> Status;
    pub fn od_group_failure(group: *const Group, out: *mut i32, err: *mut Error) -> Status;
    pub fn od_flight_record(nccl: i32, only_active: i32, out: *mut *mut c_char, err: *mut Error) -> Status;
    pub fn od_group_abort(group: *const Group, err: *mut Error) -> Status;
    pub fn od_group_sum_with_grad(
        group: *const Group,
        tensor: *const C_tensor,
        out: *mut *mut C_tensor,
        err: *mut Error,
    ) -> Status;

    pub fn od_collective_start(
        group: *const Group,
        collective: *const Collective,
        out: *mut *mut Work,
        err: *mut Error,
    ) -> Status;
    pub fn od_batch_start(
        group: *const Group,
        tensors: *const TensorList,
        peers: *const i32,
        receives: *const i32,
        out: *mut *mut Work,
        err: *mut Error,
    ) -> Status;
    pub fn od_work_free(work: *mut Work);
    pub fn od_work_is_completed(work: *const Work) -> i32;
    pub fn od_work_wait(work: *const Work, timeout_ms: i64, err: *mut Error) -> Status;
    pub fn od_work_wait_for(work: *const Work, timeout_ms: i64, err: *mut Error) -> Status;
    pub fn od_work_source_rank(work: *const Work, out: *mut i32, err: *mut Error) -> Status;

    pub fn od_reducer_new(
        group: *const Group,
        params: *const TensorList,
        names: *const *const c_char,
        sparse: *const u8,
        options: *const ReducerOptions,
        out: *mut *mut Reducer,
        err: *mut Error,
    ) -> Status;
    pub fn od_reducer_free(reducer: *mut Reducer);
    pub fn od_reducer_before_forward(
        reducer: *const Reducer,
        synchronised: i32,
        rebuilt: *mut i32,
        err: *mut Error,
    ) -> Status;
    pub fn od_reducer_lower(reducer: *const Reducer, out: *mut i32, err: *mut Error) -> Status;
    pub fn od_reducer_raise(reducer: *const Reducer, err: *mut Error) -> Status;
    pub fn od_reducer_arm(reducer: *const Reducer, outputs: *const TensorList, err: *mut Error) -> Status;
    pub fn od_reducer_disarm(reducer: *const Reducer, err: *mut Error) -> Status;
    pub fn od_reducer_close_with_nothing(reducer: *const Reducer, err: *mut Error) -> Status;
    pub fn od_reducer_within_backward(reducer: *const Reducer) -> i32;
    pub fn od_reducer_sink(
        reducer: *const Reducer,
        outputs: *const TensorList,
        out: *mut *mut TensorList,
        err: *mut Error,
    ) -> Status;
    pub fn od_reducer_fp16_hook(reducer: *const Reducer, err: *mut Error) -> Status;
    pub fn od_reducer_set_hook(
        reducer: *mut Reducer,
        owner: *mut c_void,
        start: extern "C" fn(*mut c_void, *const Bucket) -> i32,
        finish: extern "C" fn(*mut c_void, usize) -> *mut C_tensor,
        drop: extern "C" fn(*mut c_void),
        err: *mut Error,
    ) -> Status;
    pub fn od_reducer_layout(
        reducer: *const Reducer,
        numbers: *mut usize,
        lengths: *mut usize,
        count: *mut usize,
        is_final: *mut i32,
        err: *mut Error,
    ) -> Status;
    pub fn od_reducer_lay_out(
        reducer: *const Reducer,
        numbers: *const usize,
        lengths: *const usize,
        count: usize,
        is_final: i32,
        err: *mut Error,
    ) -> Status;
    pub fn od_reducer_shadow(reducer: *mut Reducer, err: *mut Error) -> Status;
    pub fn od_reducer_divide_by(
        reducer: *const Reducer,
        active_ranks: *const Work,
        by_world_size: i32,
        err: *mut Error,
    ) -> Status;
    pub fn od_reducer_set_log_rate(reducer: *mut Reducer, steps: i32, err: *mut Error) -> Status;
    pub fn od_reducer_log(
        reducer: *const Reducer,
        visitor: *mut c_void,
        visit: extern "C" fn(*mut c_void, *const c_char, *const c_char),
        err: *mut Error,
    ) -> Status;
    pub fn od_sign_compress(
        grad: *const C_tensor,
        error: *const C_tensor,
        packed: *mut *mut C_tensor,
        scale: *mut *mut C_tensor,
        err: *mut Error,
    ) -> Status;
    pub fn od_sign_expand(
        packed: *const C_tensor,
        value: f32,
        out: *const C_tensor,
        add: i32,
        err: *mut Error,
    ) -> Status;
    pub fn od_take_largest(
        grad: *const C_tensor,
        error: *const C_tensor,
        kept: i64,
        places: *mut *mut C_tensor,
        values: *mut *mut C_tensor,
        err: *mut Error,
    ) -> Status;
    pub fn od_reducer_backward(loss: *const C_tensor, err: *mut Error) -> Status;
}
