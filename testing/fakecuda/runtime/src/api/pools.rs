//! Memory that is allocated and freed in the order of a stream, and the pools that it comes from.

use std::ffi::c_void;

use super::code;
use super::memory::UNWRITTEN;
use crate::error::CudaError;
use crate::poison::spoil;
use crate::world::{World, world};

/// The handle of a device's default pool, the only one it has.
const fn pool_of(device: usize) -> usize {
    (device + 1) * 16
}

fn device_of(world: &World, pool: usize) -> Result<usize, CudaError> {
    let device = (0..world.devices.len()).find(|device| pool_of(*device) == pool);
    device.ok_or(CudaError::INVALID_VALUE)
}

/// Allocates at once: the block can be used at the stream's next operation, as with the real one. In a capture it would
/// be a node, which nothing here has.
///
/// # Safety
/// `address` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMallocAsync(address: *mut usize, bytes: usize, stream: usize) -> i32 {
    if address.is_null() {
        return code(Err(CudaError::INVALID_VALUE));
    }
    let mut world = world();
    let block = world.stream(stream).and_then(|stream| {
        world.use_stream_memory("cudaMallocAsync", stream)?;
        let device = world.progress.device_of(stream).ok_or(CudaError::INVALID_RESOURCE_HANDLE)?;
        world.use_device(device)?;
        world.count("allocations in the order of a stream", 1);
        let block = world.allocate(device, bytes).ok_or(CudaError::MEMORY_ALLOCATION)?;
        spoil(world.on_host(block), bytes, UNWRITTEN);
        Ok(block)
    });
    // SAFETY: as the caller says, and it is not null.
    code(block.map(|block| unsafe { *address = block }))
}

/// # Safety
/// As `cudaMallocAsync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMallocFromPoolAsync(address: *mut usize, bytes: usize, pool: usize, stream: usize) -> i32 {
    if let Err(error) = device_of(&world(), pool) {
        return code(Err(error));
    }
    // SAFETY: as the caller says.
    unsafe { cudaMallocAsync(address, bytes, stream) }
}

/// The block can be allocated again once the stream has come here.
#[unsafe(no_mangle)]
pub extern "C" fn cudaFreeAsync(address: usize, stream: usize) -> i32 {
    let mut world = world();
    let freed = world.stream(stream).and_then(|stream| {
        world.use_stream_memory("cudaFreeAsync", stream)?;
        world.count("frees in the order of a stream", 1);
        world.free_after(address, stream)
    });
    code(freed)
}

/// # Safety
/// `pool` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaDeviceGetDefaultMemPool(pool: *mut usize, device: i32) -> i32 {
    let is_known = usize::try_from(device).is_ok_and(|device| device < world().devices.len());
    if pool.is_null() || !is_known {
        return code(Err(if pool.is_null() { CudaError::INVALID_VALUE } else { CudaError::INVALID_DEVICE }));
    }
    // SAFETY: as the caller says, and it is not null.
    unsafe { *pool = pool_of(device as usize) };
    0
}

/// # Safety
/// As `cudaDeviceGetDefaultMemPool`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaDeviceGetMemPool(pool: *mut usize, device: i32) -> i32 {
    // SAFETY: as the caller says.
    unsafe { cudaDeviceGetDefaultMemPool(pool, device) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemPoolSetAttribute(pool: usize, _attribute: i32, _value: *mut c_void) -> i32 {
    // Nothing here depends on what is kept for later.
    code(device_of(&world(), pool).map(drop))
}

/// # Safety
/// `value` has to be null or valid for writes of what the attribute is: a 32-bit number up to 3, then a 64-bit one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMemPoolGetAttribute(pool: usize, attribute: i32, value: *mut c_void) -> i32 {
    let world = world();
    let device = match device_of(&world, pool) {
        Ok(device) if !value.is_null() => device,
        Ok(_) => return code(Err(CudaError::INVALID_VALUE)),
        Err(error) => return code(Err(error)),
    };
    // The device's whole memory stands for the pool's.
    let used = world.devices[device].memory.usage().0 as u64;
    // SAFETY: as the caller says, and it is not null.
    unsafe {
        match attribute {
            // Reuse, which is not there.
            1..=3 => value.cast::<i32>().write_unaligned(0),
            // The threshold of release.
            4 => value.cast::<u64>().write_unaligned(0),
            // What is reserved and used, now and at most.
            5..=8 => value.cast::<u64>().write_unaligned(used),
            _ => return code(Err(CudaError::INVALID_VALUE)),
        }
    }
    0
}

/// Every device reaches every other's memory.
#[unsafe(no_mangle)]
pub extern "C" fn cudaMemPoolSetAccess(pool: usize, _accesses: *const c_void, _count: usize) -> i32 {
    code(device_of(&world(), pool).map(drop))
}

/// Nothing is kept that could be given back.
#[unsafe(no_mangle)]
pub extern "C" fn cudaMemPoolTrimTo(pool: usize, _bytes: usize) -> i32 {
    code(device_of(&world(), pool).map(drop))
}

impl World {
    /// Refuses to allocate or free in the order of a stream that is captured.
    fn use_stream_memory(&mut self, what: &str, stream: u64) -> Result<(), CudaError> {
        let refused = self.captures.refuse(stream, CudaError::CAPTURE_UNSUPPORTED);
        self.judged(what, refused)?;
        self.use_legacy(what, stream)
    }

    /// A new block of a device. What was freed in the order of streams that have come so far is free before it.
    pub fn allocate(&mut self, device: usize, bytes: usize) -> Option<usize> {
        let progress = &mut self.progress;
        let (done, waiting): (Vec<_>, Vec<_>) =
            self.freed.drain(..).partition(|(_, event)| progress.has_happened(*event) != Some(false));
        for (address, event) in done {
            progress.end_event(event);
            for own in &mut self.devices {
                // Only one of them has it.
                own.memory.free(address);
            }
        }
        self.freed = waiting;
        self.devices.get_mut(device)?.memory.allocate(bytes)
    }

    /// Frees a block once a stream has come here.
    fn free_after(&mut self, address: usize, stream: u64) -> Result<(), CudaError> {
        let device = self.device_at(address).ok_or(CudaError::INVALID_VALUE)?;
        let begins = self.devices[device].memory.block(address).is_some_and(|block| block.start == address);
        if !begins || self.freed.iter().any(|(freed, _)| *freed == address) {
            return Err(CudaError::INVALID_VALUE);
        }
        let event = self.progress.add_event(false);
        self.progress.record(event, stream);
        self.freed.push((address, event));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_freed_block_is_used_again_only_when_its_stream_has_come_there() {
        let mut world = World::of_a_test();
        let stream = world.devices[0].legacy;
        let block = world.allocate(0, 1000).unwrap();
        assert_eq!(world.free_after(block + 512, stream), Err(CudaError::INVALID_VALUE));
        world.push(stream, "work", &[], std::sync::Arc::new(|| {})).unwrap();
        assert_eq!(world.free_after(block, stream), Ok(()));
        assert_eq!(world.free_after(block, stream), Err(CudaError::INVALID_VALUE), "twice");
        assert_ne!(world.allocate(0, 1000), Some(block));
        world.synchronize(stream).unwrap();
        assert_eq!(world.allocate(0, 1000), Some(block));
    }

    #[test]
    fn a_pool_is_that_of_a_device() {
        let mut pool = 0;
        // SAFETY: valid for writes.
        unsafe {
            assert_eq!((cudaDeviceGetDefaultMemPool(&raw mut pool, 0), pool), (0, 16));
            assert_eq!(cudaDeviceGetDefaultMemPool(&raw mut pool, 99), CudaError::INVALID_DEVICE.0);
        }
        assert_eq!((cudaMemPoolTrimTo(16, 0), cudaMemPoolTrimTo(17, 0)), (0, CudaError::INVALID_VALUE.0));
    }
}
