//! Memory of devices and of the host, copies and fills.

use std::ffi::c_void;
use std::sync::Arc;

use super::code;
use super::operators::reads_within;
use super::streams::has_waited_in_copy;
use crate::clock::Access;
use crate::error::CudaError;
use crate::guard;
use crate::nccl::communicator;
use crate::operation::{Kind, Operation};
use crate::poison::{poison, spoil};
use crate::world::{CURRENT, World, world};

/// Why new memory is poison.
pub const UNWRITTEN: &str = "nothing has written this memory";

/// # Safety
/// `address` has to be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMalloc(address: *mut usize, bytes: usize) -> i32 {
    let mut world = world();
    let allowed = world.use_unsafe("cudaMalloc").and_then(|()| world.use_device(CURRENT.get()));
    if let Err(error) = allowed {
        return code(Err(error));
    }
    world.count("device allocations", 1);
    let block = world.allocate(CURRENT.get(), bytes);
    if let Some(block) = block {
        spoil(world.on_host(block), bytes, UNWRITTEN);
    }
    // SAFETY: as the caller says.
    unsafe { *address = block.unwrap_or(0) };
    code(block.map(drop).ok_or(CudaError::MEMORY_ALLOCATION))
}

/// Waits for its device, as the real one does.
#[unsafe(no_mangle)]
pub extern "C" fn cudaFree(address: usize) -> i32 {
    let mut world = world();
    if address == 0 {
        return code(world.use_device(CURRENT.get()));
    }
    if let Err(error) = world.use_unsafe("cudaFree") {
        return code(Err(error));
    }
    world.count("device frees", 1);
    world.waits.note("device free");
    let Some(device) = world.device_at(address) else { return code(Err(CudaError::INVALID_VALUE)) };
    if communicator::is_registered(address) {
        world.count("nccl memory freed while registered", 1);
    }
    let told = world.synchronize_device(device);
    let freed = world.devices[device].memory.free(address);
    code(if freed { told } else { Err(CudaError::INVALID_VALUE) })
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
    let mut world = world();
    let allowed = world.use_unsafe("cudaHostAlloc").and_then(|()| world.use_device(CURRENT.get()));
    if let Err(error) = allowed {
        return code(Err(error));
    }
    let Some(length) = bytes.max(1).checked_next_multiple_of(PAGE) else {
        return code(Err(CudaError::MEMORY_ALLOCATION));
    };
    // SAFETY: the alignment is a power of 2, and the size a multiple of it.
    let block = unsafe { libc::aligned_alloc(PAGE, length) } as usize;
    world.count("pinned allocations", 1);
    if block != 0 {
        world.pinned.insert(block, length);
        // No program may rely on zeros there.
        // SAFETY: new memory of this length.
        unsafe { std::ptr::write_bytes(block as *mut u8, 0xa5, length) };
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
    if let Err(error) = world.use_unsafe("cudaFreeHost") {
        return code(Err(error));
    }
    world.count("pinned frees", 1);
    world.waits.note("pinned free");
    world.synchronize_all();
    let Some(length) = world.pinned.remove(&address) else { return code(Err(CudaError::INVALID_VALUE)) };
    guard::forget(&(address..address + length));
    // SAFETY: made by `cudaHostAlloc`, and not freed since: it was in the list.
    unsafe { libc::free(address as *mut c_void) };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaHostRegister(address: usize, bytes: usize, _flags: u32) -> i32 {
    let mut world = world();
    if let Err(error) = world.use_unsafe("cudaHostRegister") {
        return code(Err(error));
    }
    world.count("host memory pinned", 1);
    world.pinned.insert(address, bytes);
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaHostUnregister(address: usize) -> i32 {
    let mut world = world();
    if let Err(error) = world.use_unsafe("cudaHostUnregister") {
        return code(Err(error));
    }
    world.count("pinned frees", 1);
    world.waits.note("pinned free");
    world.synchronize_all();
    let removed = world.pinned.remove(&address).ok_or(CudaError::HOST_NOT_REGISTERED);
    code(removed.map(|length| guard::forget(&(address..address + length))))
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
    let mut world = world();
    // As PyTorch has found: it asks on a device that has a context.
    if let Err(error) = world.use_device(CURRENT.get()) {
        return code(Err(error));
    }
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

/// Refuses a copy that a capture cannot hold: one that the host waits for, and one of pageable memory, which begins
/// with a wait for the stream ("API synchronization behavior" in the reference of the runtime).
fn use_copy(world: &mut World, stream: u64, is_pageable: bool, is_async: bool) -> Result<(), CudaError> {
    if !is_async {
        world.use_unsafe("cudaMemcpy")?;
        world.use_stream("cudaMemcpy", stream)?;
    }
    match is_pageable {
        true => world.use_stream("a copy of pageable memory", stream),
        false => Ok(()),
    }
}

/// Copies rows in the order of the stream. One from pageable memory reads it before it returns, and one to pageable
/// memory waits, as the real ones do.
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
    if let Err(error) = use_copy(&mut world, stream, is_pageable && kind != "device to device", is_async) {
        return code(Err(error));
    }
    let bytes = width * height;
    let counts = vec![(format!("copies {kind}{memory}"), 1), (format!("bytes {kind}{memory}"), bytes as u64)];
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
    let to_host = world.device_at(to.address).is_none();
    if let Some(operator) = reads_within().filter(|_| to_host) {
        world.note(format!("{operator} reads on the host what its kernels would have computed"));
    }
    let work = move || {
        for number in 0..height {
            let from = staged.as_ref().map_or(source + number * from.pitch, |it| it.as_ptr() as usize + number * width);
            let to = (target + number * to.pitch) as *mut u8;
            poison().copy(to as usize, from, width, to_host);
            // SAFETY: the caller promises both places to the copy until it is done; they may overlap.
            unsafe { std::ptr::copy(from as *const u8, to, width) };
        }
    };
    let copy = Operation::new(Kind::Copy(bytes), &format!("copy {kind}"), Arc::new(work));
    let pushed = world.issue(stream, Operation { accesses: accesses.to_vec(), counts, ..copy });
    let waits = match kind {
        "device to device" => false,
        "host to device" => !is_async,
        _ => !is_async || is_pageable,
    };
    code(pushed.and_then(|()| {
        if !waits {
            return Ok(());
        }
        let what = if is_async { "async copies that wait" } else { "copies that wait" };
        world.count(what, 1);
        world.waits.note(what);
        world.synchronize(stream)?;
        has_waited_in_copy(is_async.then(|| (stream, world.progress.issued(stream))));
        Ok(())
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
    let (target, accesses) = (world.on_host(to), [Access { bytes: to..to + bytes, writes: true }]);
    let work = move || {
        poison().clear(target, bytes);
        // SAFETY: the caller promises the bytes to the fill until it is done.
        unsafe { std::ptr::write_bytes(target as *mut u8, value as u8, bytes) };
    };
    let fill = Operation::new(Kind::Fill(bytes), "fill", Arc::new(work));
    let fill = Operation { accesses: accesses.to_vec(), counts: vec![("fills".to_owned(), 1)], ..fill };
    code(world.stream(stream).and_then(|stream| world.issue(stream, fill)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemset(to: usize, value: i32, bytes: usize) -> i32 {
    cudaMemsetAsync(to, value, bytes, 0)
}
