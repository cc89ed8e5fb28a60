//! libtorch's distributed engine: stores, process groups, collectives and the reducer of data-parallel training.
//!
//! The layer below `overdrive-ddp`, which most programs use instead. Calls block only where their documentation says
//! so, and then at most until a timeout. Nothing here checks that ranks agree: a Gloo group that receives more bytes
//! than it expects ends the process, unless it was made with [`GroupOptions::verify`].
//!
//! # Source
//! `torch.distributed`, C++ namespace `c10d`

mod bucket_hook;
mod collective;
mod group;
mod listen;
mod mem_pool;
mod reducer;
mod store;

use std::ffi::{CString, c_void};
use std::time::Duration;

use crate::error::Error;

pub use bucket_hook::{BucketHook, GradBucket};
pub use collective::{Collective, CollectiveKind, ReduceOp, Work};
pub use group::{Backend, GroupFailure, GroupOptions, ProcessGroup, flight_record, nccl_is_compiled};
pub use listen::is_loopback;
pub use mem_pool::{MemPool, MemPoolGuard};
pub use reducer::{BucketLayout, Reducer, ReducerOptions, backward};
pub use store::{Store, TcpStoreOptions};

fn c_string(text: &str) -> Result<CString, Error> {
    CString::new(text).map_err(|_| Error::refused(format!("{text:?} holds a zero byte")))
}

/// Whole milliseconds, at least one: libtorch reads 0 as "no timeout".
fn millis(timeout: Duration) -> i64 {
    i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX / 2).clamp(1, i64::from(i32::MAX))
}

extern "C" fn receive_bytes(visitor: *mut c_void, data: *const u8, bytes: usize) {
    // SAFETY: every caller passes its own `Vec<u8>`, which lives through the call.
    let out = unsafe { &mut *visitor.cast::<Vec<u8>>() };
    if bytes > 0 {
        // SAFETY: `data` points to `bytes` bytes for the length of this call.
        out.extend_from_slice(unsafe { std::slice::from_raw_parts(data, bytes) });
    }
}
