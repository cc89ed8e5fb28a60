//! Devices, versions and errors.

use std::ffi::c_char;

use super::code;
use crate::error::CudaError;
use crate::world::{CURRENT, LAST_ERROR, world};

const VERSION: i32 = 13_000;
const NAME: &[u8] = b"fake H100 (no GPU)\0";

/// The attributes that libtorch asks for, by their numbers in `cudaDeviceAttr`.
pub fn attribute(number: i32) -> i32 {
    match number {
        // Threads per block: in all, along x, and along y.
        1..=3 => 1024,
        // Along z.
        4 => 64,
        // Blocks per grid: along x; along y and z.
        5 => i32::MAX,
        6 | 7 => 65_535,
        // Shared memory per block.
        8 => 49_152,
        // Threads per warp.
        10 => 32,
        // Registers per block, and per multiprocessor.
        12 | 82 => 65_536,
        // Multiprocessors.
        16 => 132,
        // Threads per multiprocessor.
        39 => 2048,
        // One address space for host and devices.
        41 => 1,
        // Compute capability.
        75 => 9,
        76 => 0,
        // Shared memory per multiprocessor.
        81 => 233_472,
        // Cooperative launches.
        95 => 1,
        // Shared memory per block, opt-in.
        97 => 232_448,
        // Blocks per multiprocessor.
        106 => 32,
        _ => 0,
    }
}

fn known(device: i32) -> Result<usize, CudaError> {
    let device = usize::try_from(device).map_err(|_| CudaError::INVALID_DEVICE)?;
    if device < world().devices.len() { Ok(device) } else { Err(CudaError::INVALID_DEVICE) }
}

/// # Safety
/// `count` has to be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGetDeviceCount(count: *mut i32) -> i32 {
    let devices = world().devices.len();
    // SAFETY: as the caller says.
    unsafe { *count = devices as i32 };
    code(if devices > 0 { Ok(()) } else { Err(CudaError::NO_DEVICE) })
}

/// # Safety
/// `device` has to be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGetDevice(device: *mut i32) -> i32 {
    // SAFETY: as the caller says.
    unsafe { *device = CURRENT.get() as i32 };
    0
}

/// Makes the device's context too, since CUDA 12.
#[unsafe(no_mangle)]
pub extern "C" fn cudaSetDevice(device: i32) -> i32 {
    code(known(device).and_then(|device| world().use_device(device).map(|()| CURRENT.set(device))))
}

/// # Safety
/// `version` has to be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaDriverGetVersion(version: *mut i32) -> i32 {
    // SAFETY: as the caller says.
    unsafe { *version = VERSION };
    0
}

/// # Safety
/// As `cudaDriverGetVersion`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaRuntimeGetVersion(version: *mut i32) -> i32 {
    // SAFETY: as the caller says.
    unsafe { cudaDriverGetVersion(version) }
}

/// # Safety
/// `value` has to be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaDeviceGetAttribute(value: *mut i32, number: i32, device: i32) -> i32 {
    // SAFETY: as the caller says.
    code(known(device).map(|_| unsafe { *value = attribute(number) }))
}

/// CUDA 13's `cudaDeviceProp`, as far as libtorch reads it; the rest is 0.
#[repr(C)]
pub struct Properties {
    name: [u8; 256],
    uuid: [u8; 16],
    luid: [u8; 8],
    luid_mask: u32,
    total_global_memory: usize,
    shared_memory_per_block: usize,
    registers_per_block: i32,
    warp_size: i32,
    memory_pitch: usize,
    max_threads_per_block: i32,
    max_threads_dim: [i32; 3],
    max_grid_size: [i32; 3],
    total_constant_memory: usize,
    major: i32,
    minor: i32,
    texture_alignment: usize,
    texture_pitch_alignment: usize,
    multiprocessors: i32,
    integrated: i32,
    can_map_host_memory: i32,
    textures_and_surfaces: [i32; 39],
    surface_alignment: usize,
    concurrent_kernels: i32,
    ecc: i32,
    pci_bus: i32,
    pci_device: i32,
    pci_domain: i32,
    tcc: i32,
    async_engines: i32,
    unified_addressing: i32,
    memory_bus_width: i32,
    l2_cache_size: i32,
    persisting_l2_cache_size: i32,
    max_threads_per_multiprocessor: i32,
    stream_priorities: i32,
    global_l1_cache: i32,
    local_l1_cache: i32,
    shared_memory_per_multiprocessor: usize,
    registers_per_multiprocessor: i32,
    managed_memory: i32,
    others: [i32; 7],
    cooperative_launch: i32,
    shared_memory_per_block_opt_in: usize,
    page_tables: [i32; 2],
    max_blocks_per_multiprocessor: i32,
    access_policy_window: i32,
    reserved_shared_memory_per_block: usize,
    more: [i32; 76],
}

/// # Safety
/// `properties` has to be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGetDeviceProperties(properties: *mut Properties, device: i32) -> i32 {
    code(known(device).map(|device| {
        let total = world().devices[device].memory.usage().1;
        // SAFETY: as the caller says; zeros are a value of each field.
        let own = unsafe {
            properties.write_bytes(0, 1);
            &mut *properties
        };
        own.name[..NAME.len()].copy_from_slice(NAME);
        own.uuid[0] = device as u8 + 1;
        (own.total_global_memory, own.total_constant_memory) = (total, 65_536);
        (own.shared_memory_per_block, own.registers_per_block, own.warp_size) = (49_152, 65_536, 32);
        own.max_threads_per_block = 1024;
        (own.max_threads_dim, own.max_grid_size) = ([1024, 1024, 64], [i32::MAX, 65_535, 65_535]);
        (own.major, own.minor, own.multiprocessors) = (9, 0, 132);
        (own.memory_pitch, own.texture_alignment, own.can_map_host_memory) = (i32::MAX as usize, 512, 1);
        (own.concurrent_kernels, own.async_engines, own.unified_addressing) = (1, 3, 1);
        own.pci_bus = device as i32 + 1;
        (own.l2_cache_size, own.max_threads_per_multiprocessor, own.stream_priorities) = (50 << 20, 2048, 1);
        (own.shared_memory_per_multiprocessor, own.registers_per_multiprocessor) = (233_472, 65_536);
        (own.managed_memory, own.cooperative_launch, own.max_blocks_per_multiprocessor) = (1, 1, 32);
        own.shared_memory_per_block_opt_in = 232_448;
    }))
}

/// # Safety
/// `can` has to be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaDeviceCanAccessPeer(can: *mut i32, device: i32, peer: i32) -> i32 {
    // SAFETY: as the caller says.
    code(known(device).and_then(|_| known(peer)).map(|_| unsafe { *can = i32::from(device != peer) }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceEnablePeerAccess(peer: i32, flags: u32) -> i32 {
    if flags != 0 {
        return code(Err(CudaError::INVALID_VALUE));
    }
    code(known(peer).and_then(|peer| world().peers.enable(CURRENT.get(), peer)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceDisablePeerAccess(peer: i32) -> i32 {
    code(known(peer).and_then(|peer| world().peers.disable(CURRENT.get(), peer)))
}

/// # Safety
/// Both have to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaDeviceGetStreamPriorityRange(least: *mut i32, greatest: *mut i32) -> i32 {
    if let Err(error) = world().use_device(CURRENT.get()) {
        return code(Err(error));
    }
    for (place, value) in [(least, 0), (greatest, -5)] {
        if !place.is_null() {
            // SAFETY: as the caller says.
            unsafe { *place = value };
        }
    }
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetLastError() -> i32 {
    LAST_ERROR.replace(0)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaPeekAtLastError() -> i32 {
    LAST_ERROR.get()
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorName(error: i32) -> *const c_char {
    CudaError(error).words().0.as_ptr().cast()
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorString(error: i32) -> *const c_char {
    CudaError(error).words().1.as_ptr().cast()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn properties_have_the_layout_of_cuda_13() {
        assert_eq!(size_of::<Properties>(), 1008);
        let offsets = [
            std::mem::offset_of!(Properties, multiprocessors),
            std::mem::offset_of!(Properties, surface_alignment),
            std::mem::offset_of!(Properties, shared_memory_per_multiprocessor),
            std::mem::offset_of!(Properties, cooperative_launch),
            std::mem::offset_of!(Properties, reserved_shared_memory_per_block),
        ];
        assert_eq!(offsets, [384, 552, 624, 668, 696]);
    }

    #[test]
    fn a_missing_device_sets_the_last_error_of_the_thread() {
        assert_eq!(cudaSetDevice(99), CudaError::INVALID_DEVICE.0);
        assert_eq!(cudaPeekAtLastError(), CudaError::INVALID_DEVICE.0);
        assert_eq!((cudaGetLastError(), cudaGetLastError()), (CudaError::INVALID_DEVICE.0, 0));
    }
}
