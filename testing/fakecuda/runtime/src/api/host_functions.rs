//! Functions of the host that run in the order of a stream.
//!
//! They run while a thread waits for the stream, and hold up the stand-in meanwhile. So one must not wait for another
//! thread that calls CUDA; the real one forbids only that it waits for the device's work.

use std::ffi::c_void;
use std::sync::Arc;

use super::code;
use crate::error::CudaError;
use crate::operation::{Kind, Operation};
use crate::world::{IN_HOST_FUNCTION, world};

/// An address that only a host function uses.
#[derive(Clone, Copy)]
struct Data(*mut c_void);

// SAFETY: whoever issues a host function gives it the data, on whichever thread it runs.
unsafe impl Send for Data {}
// SAFETY: as above; the world's lock is held while it runs.
unsafe impl Sync for Data {}

impl Data {
    fn address(self) -> *mut c_void {
        self.0
    }
}

/// Runs a function of the program, which may not call CUDA.
fn call(function: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    function();
    IN_HOST_FUNCTION.set(false);
}

fn issue(stream: usize, what: &str, function: impl Fn() + Send + Sync + 'static) -> i32 {
    let own = Operation::new(Kind::Host, what, Arc::new(move || call(&function)));
    let own = Operation { counts: vec![("host functions".to_owned(), 1)], ..own };
    let mut world = world();
    code(world.stream(stream).and_then(|stream| world.issue(stream, own)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaLaunchHostFunc(
    stream: usize,
    function: Option<extern "C" fn(*mut c_void)>,
    data: *mut c_void,
) -> i32 {
    let Some(function) = function else { return code(Err(CudaError::INVALID_VALUE)) };
    let data = Data(data);
    issue(stream, "host function", move || function(data.address()))
}

/// "This function is not supported with cudaStreamBeginCapture."
#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamAddCallback(
    stream: usize,
    function: Option<extern "C" fn(usize, i32, *mut c_void)>,
    data: *mut c_void,
    flags: u32,
) -> i32 {
    let Some(function) = function.filter(|_| flags == 0) else { return code(Err(CudaError::INVALID_VALUE)) };
    let refused = {
        let mut world = world();
        let refused = world.stream(stream).and_then(|own| world.captures.refuse(own, CudaError::CAPTURE_UNSUPPORTED));
        world.judged("cudaStreamAddCallback", refused)
    };
    if let Err(error) = refused {
        return code(Err(error));
    }
    let data = Data(data);
    issue(stream, "callback", move || function(stream, 0, data.address()))
}
