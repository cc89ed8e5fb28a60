//! Memory of devices and of the host, copies and fills.

use std::ffi::c_void;

use super::code;
use crate::clock::Access;
use crate::error::CudaError;
use crate::world::{CURRENT, World, world};

/// # Safety
/// `address` has to be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMalloc(address: *mut usize, bytes: usize) -> i32 {
    let mut world = world();
    world.count("device allocations", 1);
    let block = match world.use_device(CURRENT.get()) {
        Ok(()) => world.devices[CURRENT.get()].memory.allocate(bytes),
        Err(error) => return code(Err(error)),
    };
    // SAFETY: as the caller says.
    unsafe { *address = block.unwrap_or(0) };
    code(block.map(drop).ok_or(CudaError::MEMORY_ALLOCATION))
}

/// Waits for everything, as the real one does.
#[unsafe(no_mangle)]
pub extern "C" fn cudaFree(address: usize) -> i32 {
    let mut world = world();
    if address == 0 {
        return code(world.use_device(CURRENT.get()));
    }
    world.count("device frees", 1);
    world.synchronize_all();
    let freed = world.device_at(address).is_some_and(|device| world.devices[device].memory.free(address));
    code(if freed { Ok(()) } else { Err(CudaError::INVALID_VALUE) })
}

/// # Safety
/// Both have to be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMemGetInfo(free: *mut usize, total: *mut usize) -> i32 {
    let usage = world().devices.get(CURRENT.get()).map(|device| device.memory.usage());
    // SAFETY: as the caller says.
    code(
        usage
            .ok_or(CudaError::NO_DEVICE)
            .map(|(used, all)| unsafe { (*free, *total) = (all.saturating_sub(used), all) }),
    )
}

/// # Safety
/// `address` has to be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaHostAlloc(address: *mut usize, bytes: usize, _flags: u32) -> i32 {
    const PAGE: usize = 4096;
    let length = bytes.max(1).next_multiple_of(PAGE);
    // SAFETY: the alignment is a power of 2, and the size a multiple of it.
    let block = unsafe { libc::aligned_alloc(PAGE, length) } as usize;
    let mut world = world();
    if let Err(error) = world.use_device(CURRENT.get()) {
        return code(Err(error));
    }
    world.count("pinned allocations", 1);
    if block != 0 {
        world.pinned.insert(block, length);
    }
    // SAFETY: as the caller says.
    unsafe { *address = block };
    code(if block == 0 { Err(CudaError::MEMORY_ALLOCATION) } else { Ok(()) })
}

/// # Safety
/// Nobody may use the block any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaFreeHost(address: usize) -> i32 {
    let mut world = world();
    world.synchronize_all();
    if world.pinned.remove(&address).is_none() {
        return code(Err(CudaError::INVALID_VALUE));
    }
    // SAFETY: made by `cudaHostAlloc`, and not freed since: it was in the list.
    unsafe { libc::free(address as *mut c_void) };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaHostRegister(address: usize, bytes: usize, _flags: u32) -> i32 {
    let mut world = world();
    world.count("host memory pinned", 1);
    world.pinned.insert(address, bytes);
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaHostUnregister(address: usize) -> i32 {
    let mut world = world();
    world.synchronize_all();
    code(world.pinned.remove(&address).map(drop).ok_or(CudaError::HOST_NOT_REGISTERED))
}

/// `cudaPointerAttributes` of CUDA 13.
#[repr(C)]
pub struct PointerAttributes {
    kind: i32,
    device: i32,
    device_pointer: usize,
    host_pointer: usize,
    reserved: [usize; 8],
}

/// # Safety
/// `attributes` has to be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaPointerGetAttributes(attributes: *mut PointerAttributes, address: usize) -> i32 {
    const NO_DEVICE: i32 = -2;
    let world = world();
    let (kind, device, device_pointer, host_pointer) = match world.device_at(address) {
        Some(device) => (2, device as i32, address, 0),
        None if world.is_pinned(address) => (1, CURRENT.get() as i32, address, address),
        None => (0, NO_DEVICE, 0, address),
    };
    // SAFETY: as the caller says.
    unsafe { *attributes = PointerAttributes { kind, device, device_pointer, host_pointer, reserved: [0; 8] } };
    0
}

/// Rows of bytes at a place.
#[derive(Clone, Copy)]
struct Place {
    address: usize,
    pitch: usize,
}

/// What a copy is between: the host or a device on each side.
fn kind_of(world: &World, from: usize, to: usize) -> &'static str {
    match (world.device_at(from), world.device_at(to)) {
        (None, None) => "host to host",
        (None, Some(_)) => "host to device",
        (Some(_), None) => "device to host",
        (Some(_), Some(_)) => "device to device",
    }
}

/// Copies rows in the order of the stream. One from pageable memory reads it before it returns, and one to pageable memory
/// waits, as the real ones do.
fn copy(to: Place, from: Place, (width, height): (usize, usize), stream: usize, is_async: bool) -> i32 {
    if width * height == 0 {
        return 0;
    }
    let mut world = world();
    let stream = match world.stream(stream) {
        Ok(stream) => stream,
        Err(error) => return code(Err(error)),
    };
    let kind = kind_of(&world, from.address, to.address);
    let is_pageable =
        [from, to].iter().any(|place| world.device_at(place.address).is_none() && !world.is_pinned(place.address));
    let memory = match (kind, is_pageable) {
        ("device to device", _) => "",
        (_, true) => ", pageable",
        (_, false) => ", pinned",
    };
    world.count(&format!("copies {kind}{memory}"), 1);
    world.count(&format!("bytes {kind}{memory}"), (width * height) as u64);
    let end = |place: Place| place.address + place.pitch * (height - 1) + width;
    let accesses =
        [(from, false), (to, true)].map(|(place, writes)| Access { bytes: place.address..end(place), writes });
    let (target, source) = (world.on_host(to.address), world.on_host(from.address));
    let staged: Option<Vec<u8>> = (kind == "host to device" && is_pageable).then(|| {
        let row = |number: usize| {
            // SAFETY: the caller of the copy promises these bytes to it until it returns.
            unsafe { std::slice::from_raw_parts((source + number * from.pitch) as *const u8, width) }
        };
        (0..height).flat_map(row).copied().collect()
    });
    let work = move || {
        for number in 0..height {
            let from = staged.as_ref().map_or(source + number * from.pitch, |it| it.as_ptr() as usize + number * width);
            let to = (target + number * to.pitch) as *mut u8;
            // SAFETY: the caller promises both places to the copy until it is done; they may overlap.
            unsafe { std::ptr::copy(from as *const u8, to, width) };
        }
    };
    let pushed = world.push(stream, &format!("copy {kind}"), &accesses, Box::new(work));
    let waits = match kind {
        "device to device" => false,
        "host to device" => !is_async,
        _ => !is_async || is_pageable,
    };
    code(pushed.and_then(|()| {
        if !waits {
            return Ok(());
        }
        world.count(if is_async { "async copies that wait" } else { "copies that wait" }, 1);
        world.synchronize(stream)
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpy(to: usize, from: usize, bytes: usize, _kind: i32) -> i32 {
    copy(Place { address: to, pitch: bytes }, Place { address: from, pitch: bytes }, (bytes, 1), 0, false)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpyAsync(to: usize, from: usize, bytes: usize, _kind: i32, stream: usize) -> i32 {
    copy(Place { address: to, pitch: bytes }, Place { address: from, pitch: bytes }, (bytes, 1), stream, true)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpyPeerAsync(
    to: usize,
    _to_device: i32,
    from: usize,
    _from_device: i32,
    bytes: usize,
    stream: usize,
) -> i32 {
    cudaMemcpyAsync(to, from, bytes, 0, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpy2DAsync(
    to: usize,
    to_pitch: usize,
    from: usize,
    from_pitch: usize,
    width: usize,
    height: usize,
    _kind: i32,
    stream: usize,
) -> i32 {
    let (to, from) = (Place { address: to, pitch: to_pitch }, Place { address: from, pitch: from_pitch });
    copy(to, from, (width, height), stream, true)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemsetAsync(to: usize, value: i32, bytes: usize, stream: usize) -> i32 {
    let mut world = world();
    world.count("fills", 1);
    let (target, accesses) = (world.on_host(to), [Access { bytes: to..to + bytes, writes: true }]);
    // SAFETY: the caller promises the bytes to the fill until it is done.
    let work = move || unsafe { std::ptr::write_bytes(target as *mut u8, value as u8, bytes) };
    code(world.stream(stream).and_then(|stream| world.push(stream, "fill", &accesses, Box::new(work))))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemset(to: usize, value: i32, bytes: usize) -> i32 {
    cudaMemsetAsync(to, value, bytes, 0)
}
