//! Streams.

use std::cell::Cell;

use super::code;
use crate::error::CudaError;
use crate::faults::told;
use crate::progress::Order;
use crate::world::{CURRENT, world};

const NON_BLOCKING: u32 = 1;

/// # Safety
/// `stream` has to be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaStreamCreateWithPriority(stream: *mut usize, flags: u32, priority: i32) -> i32 {
    let mut world = world();
    if let Err(error) = world.use_device(CURRENT.get()) {
        return code(Err(error));
    }
    world.count("streams created", 1);
    let order = if flags & NON_BLOCKING == 0 { Order::Blocking } else { Order::NonBlocking };
    let new = world.progress.add_stream(CURRENT.get(), order);
    if priority < 0 {
        world.high_priority.insert(new);
    }
    // SAFETY: as the caller says.
    unsafe { *stream = new as usize };
    0
}

/// # Safety
/// As `cudaStreamCreateWithPriority`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaStreamCreateWithFlags(stream: *mut usize, flags: u32) -> i32 {
    // SAFETY: as the caller says.
    unsafe { cudaStreamCreateWithPriority(stream, flags, 0) }
}

/// # Safety
/// As `cudaStreamCreateWithPriority`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaStreamCreate(stream: *mut usize) -> i32 {
    // SAFETY: as the caller says.
    unsafe { cudaStreamCreateWithPriority(stream, 0, 0) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamDestroy(stream: usize) -> i32 {
    let mut world = world();
    // The documentation does not speak of a stream that is captured; it could never end its capture.
    let refused = world.captures.refuse(stream as u64, CudaError::CAPTURE_UNSUPPORTED);
    if let Err(error) = world.judged("cudaStreamDestroy", refused) {
        return code(Err(error));
    }
    let ended = world.progress.end_stream(stream as u64);
    code(if ended { Ok(()) } else { Err(CudaError::INVALID_RESOURCE_HANDLE) })
}

/// # Safety
/// `priority` has to be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaStreamGetPriority(stream: usize, priority: *mut i32) -> i32 {
    let is_high = world().high_priority.contains(&(stream as u64));
    // SAFETY: as the caller says.
    unsafe { *priority = if is_high { -1 } else { 0 } };
    0
}

/// A stream, and how much was put into it.
type Place = (u64, Option<u64>);

thread_local! {
    /// Where the thread's last asynchronous copy has waited.
    static WAITED: Cell<Option<Place>> = const { Cell::new(None) };
}

/// The thread has waited in a copy.
pub(super) fn has_waited_in_copy(at: Option<Place>) {
    WAITED.set(at);
}

/// libtorch waits for the stream of a copy that has waited itself. With no work between them there is nothing left to
/// wait for: both are one wait.
#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamSynchronize(stream: usize) -> i32 {
    let mut world = world();
    code(world.stream(stream).and_then(|stream| {
        world.use_stream("cudaStreamSynchronize", stream)?;
        if WAITED.take() == Some((stream, world.progress.issued(stream))) {
            world.count("waits behind a copy's", 1);
        } else {
            world.count("waits for a stream", 1);
            world.waits.note("stream");
        }
        world.synchronize(stream)
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamQuery(stream: usize) -> i32 {
    let mut world = world();
    let idle = world.stream(stream).and_then(|stream| {
        world.use_stream("cudaStreamQuery", stream)?;
        world.progress.query(stream).ok_or(CudaError::INVALID_RESOURCE_HANDLE)
    });
    world.count_queries();
    match idle {
        // Not kept as the last error.
        Ok(false) => CudaError::NOT_READY.0,
        idle => code(idle.and_then(|_| told())),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamWaitEvent(stream: usize, event: usize, flags: u32) -> i32 {
    const EXTERNAL: u32 = 1;
    let mut world = world();
    let is_external = flags & EXTERNAL != 0;
    code(world.stream(stream).and_then(|stream| world.wait_for_event(stream, event as u64, is_external)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceSynchronize() -> i32 {
    let mut world = world();
    if let Err(error) = world.use_device_as_a_whole("cudaDeviceSynchronize", CURRENT.get()) {
        return code(Err(error));
    }
    world.count("waits for a device", 1);
    world.waits.note("device");
    code(world.synchronize_device(CURRENT.get()))
}
