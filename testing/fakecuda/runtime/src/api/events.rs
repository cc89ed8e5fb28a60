//! Events.

use super::code;
use crate::error::CudaError;
use crate::faults::told;
use crate::world::{CURRENT, world};

/// # Safety
/// `event` has to be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaEventCreateWithFlags(event: *mut usize, flags: u32) -> i32 {
    const DISABLE_TIMING: u32 = 2;
    let mut world = world();
    if let Err(error) = world.use_device(CURRENT.get()) {
        return code(Err(error));
    }
    world.count("events created", 1);
    let new = world.progress.add_event(flags & DISABLE_TIMING == 0);
    world.peers.add_event(new, CURRENT.get());
    // SAFETY: as the caller says.
    unsafe { *event = new as usize };
    0
}

/// # Safety
/// As `cudaEventCreateWithFlags`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaEventCreate(event: *mut usize) -> i32 {
    // SAFETY: as the caller says.
    unsafe { cudaEventCreateWithFlags(event, 0) }
}

fn found(is_there: bool) -> Result<(), CudaError> {
    if is_there { Ok(()) } else { Err(CudaError::INVALID_RESOURCE_HANDLE) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventDestroy(event: usize) -> i32 {
    let mut world = world();
    world.captures.forget(event as u64);
    world.peers.end_event(event as u64);
    code(found(world.progress.end_event(event as u64)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventRecordWithFlags(event: usize, stream: usize, flags: u32) -> i32 {
    const EXTERNAL: u32 = 1;
    let mut world = world();
    let is_external = flags & EXTERNAL != 0;
    code(world.stream(stream).and_then(|stream| {
        let device = world.progress.device_of(stream).ok_or(CudaError::INVALID_RESOURCE_HANDLE)?;
        world.peers.may_record(event as u64, device)?;
        world.record_event(event as u64, stream, is_external)
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventRecord(event: usize, stream: usize) -> i32 {
    cudaEventRecordWithFlags(event, stream, 0)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventQuery(event: usize) -> i32 {
    let mut world = world();
    if let Err(error) = world.use_event("cudaEventQuery", event as u64) {
        return code(Err(error));
    }
    let answer = world.progress.query_event(event as u64);
    world.count_queries();
    match answer {
        Some(true) => code(told()),
        // Not kept as the last error.
        Some(false) => CudaError::NOT_READY.0,
        None => code(Err(CudaError::INVALID_RESOURCE_HANDLE)),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventSynchronize(event: usize) -> i32 {
    let mut world = world();
    if let Err(error) = world.use_event("cudaEventSynchronize", event as u64) {
        return code(Err(error));
    }
    world.count("waits for an event", 1);
    world.waits.note("event");
    code(found(world.synchronize_event(event as u64)).and_then(|()| told()))
}

/// The milliseconds between two events, by the device's simulated clock. It advances by the set durations of kernels
/// and copies, never with real time.
///
/// # Safety
/// `milliseconds` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaEventElapsedTime(milliseconds: *mut f32, begin: usize, end: usize) -> i32 {
    const NANOSECONDS: f64 = 1e6;
    if milliseconds.is_null() {
        return code(Err(CudaError::INVALID_VALUE));
    }
    match world().elapsed(begin as u64, end as u64) {
        Ok(nanoseconds) => {
            // SAFETY: as the caller says, and it is not null.
            unsafe { *milliseconds = (nanoseconds as f64 / NANOSECONDS) as f32 };
            0
        }
        // Not kept as the last error.
        Err(CudaError::NOT_READY) => CudaError::NOT_READY.0,
        Err(error) => code(Err(error)),
    }
}
