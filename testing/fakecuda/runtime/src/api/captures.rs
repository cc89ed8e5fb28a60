//! Captures of streams.

use super::code;
use crate::capture::Mode;
use crate::capturing::MODE;
use crate::error::CudaError;
use crate::world::world;

/// `cudaStreamCaptureStatus`.
const NONE: i32 = 0;
const ACTIVE: i32 = 1;
const INVALIDATED: i32 = 2;

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamBeginCapture(stream: usize, mode: i32) -> i32 {
    let mut world = world();
    let begun = Mode::of(mode).and_then(|mode| world.stream(stream).map(|stream| (stream, mode)));
    code(begun.and_then(|(stream, mode)| world.begin_capture(stream, mode)))
}

/// # Safety
/// `graph` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaStreamEndCapture(stream: usize, graph: *mut usize) -> i32 {
    if graph.is_null() {
        return code(Err(CudaError::INVALID_VALUE));
    }
    let mut world = world();
    let ended = world.stream(stream).and_then(|stream| world.end_capture(stream));
    // SAFETY: as the caller says, and it is not null. A capture that failed has no graph.
    unsafe { *graph = ended.unwrap_or(0) };
    code(ended.map(drop))
}

/// # Safety
/// `mode` has to be null or valid for reads and writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaThreadExchangeStreamCaptureMode(mode: *mut i32) -> i32 {
    // SAFETY: as the caller says.
    let Some(mode) = (unsafe { mode.as_mut() }) else { return code(Err(CudaError::INVALID_VALUE)) };
    code(Mode::of(*mode).map(|new| *mode = MODE.replace(new) as i32))
}

/// # Safety
/// `status` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaStreamIsCapturing(stream: usize, status: *mut i32) -> i32 {
    let nothing = std::ptr::null_mut();
    // SAFETY: as the caller says.
    unsafe {
        cudaStreamGetCaptureInfo(
            stream,
            status,
            nothing,
            nothing.cast(),
            nothing.cast(),
            nothing.cast(),
            nothing.cast(),
        )
    }
}

/// # Safety
/// All have to be null or valid for writes. The nodes stay until the stream's next operation or the end of the capture.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaStreamGetCaptureInfo(
    stream: usize,
    status: *mut i32,
    id: *mut u64,
    graph: *mut usize,
    nodes: *mut *const usize,
    edges: *mut *const u8,
    count: *mut usize,
) -> i32 {
    // "If edgeData_out is non-NULL then dependencies_out must be as well."
    if status.is_null() || (!edges.is_null() && nodes.is_null()) {
        return code(Err(CudaError::INVALID_VALUE));
    }
    let world = world();
    let stream = match world.stream(stream) {
        Ok(stream) if world.legacy_is_unusable(stream) => return code(Err(CudaError::CAPTURE_IMPLICIT)),
        Ok(stream) => stream,
        Err(error) => return code(Err(error)),
    };
    let capture = world.captures.of(stream);
    let own = match capture {
        None => NONE,
        Some(capture) if capture.is_invalid => INVALIDATED,
        Some(_) => ACTIVE,
    };
    let tips = capture.map_or(&[][..], |capture| capture.tips(stream));
    // SAFETY: as the caller says, and each is null or written. No edge has data of its own.
    unsafe {
        *status = own;
        if let Some(capture) = capture {
            write(id, capture.id);
            write(graph, capture.handle);
            write(nodes, tips.as_ptr());
            write(edges, std::ptr::null());
            write(count, tips.len());
        }
    }
    0
}

/// # Safety
/// `place` has to be null or valid for writes.
unsafe fn write<T>(place: *mut T, value: T) {
    if !place.is_null() {
        // SAFETY: as the caller says.
        unsafe { place.write(value) };
    }
}
