//! The C functions of libcudart.
//!
//! Each takes what libtorch gives it: pointers that are valid for what the real function would read or write there.

mod device;
mod events;
mod launch;
mod memory;
mod queries;
mod streams;

use crate::error::CudaError;
use crate::world::LAST_ERROR;

/// What a C function returns; an error is also the thread's last one.
fn code(result: Result<(), CudaError>) -> i32 {
    match result {
        Ok(()) => 0,
        Err(error) => {
            LAST_ERROR.set(error.0);
            error.0
        }
    }
}
