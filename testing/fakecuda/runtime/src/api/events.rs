//! Events.

use super::code;
use crate::error::CudaError;
use crate::faults::told;
use crate::world::{CURRENT, world};

/// # Safety
/// `event` has to be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaEventCreateWithFlags(event: *mut usize, _flags: u32) -> i32 {
    let mut world = world();
    if let Err(error) = world.use_device(CURRENT.get()) {
        return code(Err(error));
    }
    world.count("events created", 1);
    let new = world.progress.add_event();
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
    world.peers.end_event(event as u64);
    code(found(world.progress.end_event(event as u64)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventRecordWithFlags(event: usize, stream: usize, _flags: u32) -> i32 {
    let mut world = world();
    world.count("events recorded", 1);
    code(world.stream(stream).and_then(|stream| {
        let device = world.progress.device_of(stream).ok_or(CudaError::INVALID_RESOURCE_HANDLE)?;
        world.peers.may_record(event as u64, device)?;
        found(world.progress.record(event as u64, stream))
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventRecord(event: usize, stream: usize) -> i32 {
    cudaEventRecordWithFlags(event, stream, 0)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventQuery(event: usize) -> i32 {
    match world().progress.has_happened(event as u64) {
        Some(true) => code(told()),
        // Not an error of the thread.
        Some(false) => CudaError::NOT_READY.0,
        None => code(Err(CudaError::INVALID_RESOURCE_HANDLE)),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventSynchronize(event: usize) -> i32 {
    let mut world = world();
    world.count("waits for an event", 1);
    code(found(world.progress.synchronize_event(event as u64)).and_then(|()| told()))
}
