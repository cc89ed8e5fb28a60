//! NCCL's functions for memory. They note what is registered; nothing depends on it.

use std::ffi::c_void;

use super::device::cudaSetDevice;
use super::memory::{cudaFree, cudaMalloc};
use super::nccl::{invalid, place};
use crate::nccl::code::{Code, Failure, result};
use crate::nccl::communicator;
use crate::world::{CURRENT, world};

fn register(own: usize, address: usize, bytes: usize) -> Result<usize, Failure> {
    let communicator = communicator::of(own)?;
    communicator.ready()?;
    if world().device_at(address).is_none() || bytes == 0 {
        return Err(invalid("no memory of a device to register"));
    }
    let handle = communicator.registered.add(address..address + bytes);
    let handle = handle.ok_or_else(|| invalid("a part of this memory is registered already"))?;
    world().count("nccl registrations of memory", 1);
    Ok(handle)
}

/// Sets the communicator's device and then the thread's again, as NCCL does (`commDeregister` of 2.28.9). Both then have a
/// context.
fn deregister(own: usize, handle: usize) -> Result<(), Failure> {
    let communicator = communicator::of(own)?;
    let before = CURRENT.get();
    for device in [communicator.device, before] {
        if cudaSetDevice(device as i32) != 0 {
            return Err(Failure::new(Code::UNHANDLED_CUDA, format!("device {device} cannot be set")));
        }
    }
    if !communicator.registered.remove(handle) {
        return Err(invalid("no memory is registered by this handle"));
    }
    world().count("nccl deregistrations of memory", 1);
    Ok(())
}

/// # Safety
/// `handle` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommRegister(own: usize, address: usize, bytes: usize, handle: *mut usize) -> i32 {
    // SAFETY: as the caller says.
    let found = unsafe { place(handle) }.and_then(|handle| Ok((handle, register(own, address, bytes)?)));
    result(found.map(|(handle, registered)| *handle = registered).map(|()| Code::SUCCESS))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDeregister(own: usize, handle: usize) -> i32 {
    result(deregister(own, handle).map(|()| Code::SUCCESS))
}

/// There are no windows: as NCCL does on a machine without symmetric memory, it succeeds without one.
///
/// # Safety
/// `window` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommWindowRegister(
    own: usize,
    _address: usize,
    _bytes: usize,
    window: *mut *mut c_void,
    _flags: i32,
) -> i32 {
    // SAFETY: as the caller says.
    let found = communicator::of(own).and_then(|_| unsafe { place(window) });
    result(found.map(|window| *window = std::ptr::null_mut()).map(|()| Code::SUCCESS))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommWindowDeregister(own: usize, _window: usize) -> i32 {
    result(communicator::of(own).map(|_| Code::SUCCESS))
}

fn of_cuda(error: i32) -> i32 {
    if error == 0 { Code::SUCCESS.0 } else { Code::UNHANDLED_CUDA.0 }
}

/// # Safety
/// `address` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclMemAlloc(address: *mut usize, bytes: usize) -> i32 {
    if address.is_null() || bytes == 0 {
        return result(Err(invalid("no place for an address, or no bytes")));
    }
    // SAFETY: as the caller says.
    of_cuda(unsafe { cudaMalloc(address, bytes) })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclMemFree(address: usize) -> i32 {
    of_cuda(cudaFree(address))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::nccl::ncclCommDestroy;
    use crate::api::nccl_tests::{alone, count, join_all};

    fn registered(own: usize, address: usize, bytes: usize) -> Result<usize, i32> {
        let mut handle = 0;
        // SAFETY: valid for writes.
        let code = unsafe { ncclCommRegister(own, address, bytes, &mut handle) };
        if code == 0 { Ok(handle) } else { Err(code) }
    }

    #[test]
    fn memory_is_registered_once_and_told_when_it_is_freed_before_it_is_taken_back() {
        alone(
            "api::nccl_memory::tests::memory_is_registered_once_and_told_when_it_is_freed_before_it_is_taken_back",
            || {
                let [one, other] = join_all(2)[..] else { panic!("two ranks") };
                let mut addresses = [0; 2];
                for address in &mut addresses {
                    // SAFETY: valid for writes.
                    assert_eq!(unsafe { cudaMalloc(address, 4096) }, 0);
                }
                let [address, second] = addresses;
                let handle = registered(one, address, 4096).unwrap();
                assert_ne!(handle, 0);
                assert!(registered(one, address + 1024, 1024).is_err());
                assert!(registered(one, 1, 4096).is_err());
                let on_other = registered(other, address, 4096).unwrap();
                let left = registered(other, second, 4096).unwrap();
                assert_eq!(ncclCommDeregister(one, handle), 0);
                assert_ne!(ncclCommDeregister(one, handle), 0);
                assert_eq!(ncclCommDeregister(other, on_other), 0);
                assert_eq!(cudaFree(address), 0);
                assert_eq!(count("nccl memory freed while registered"), 0);
                assert_eq!(cudaFree(second), 0);
                let counted = ["registrations of memory", "deregistrations of memory", "memory freed while registered"];
                assert_eq!(counted.map(|what| count(&format!("nccl {what}"))), [3, 2, 1]);
                std::thread::scope(|scope| {
                    for own in [one, other] {
                        scope.spawn(move || assert_eq!(ncclCommDestroy(own), 0));
                    }
                });
                assert_ne!(ncclCommDeregister(other, left), 0);
            },
        );
    }
}
