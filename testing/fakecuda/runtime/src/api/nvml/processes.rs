//! The processes on a device: this one, if it has a context there.

use super::{INSUFFICIENT_SIZE, INVALID_ARGUMENT, NOT_SUPPORTED, answer, device_of, status};
use crate::nvml::{Figure, all};
use crate::world::world;

/// `nvmlProcessInfo_v1_t`: what the function without a version in its name fills.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ProcessV1 {
    id: u32,
    used: u64,
}

/// `nvmlProcessInfo_v2_t`, also that of version 3 of the functions. All bits of an instance: none.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ProcessV2 {
    id: u32,
    used: u64,
    instances: [u32; 2],
}

/// The process and its bytes.
fn processes(own: usize) -> Result<Vec<(u32, u64)>, i32> {
    let device = device_of(own)?;
    all().get(device, Figure::Processes)?;
    let world = world();
    let device = world.devices.get(device as usize).ok_or(INVALID_ARGUMENT)?;
    Ok(if device.context.is_some() { vec![(std::process::id(), device.memory.usage().0 as u64)] } else { Vec::new() })
}

/// Fills a list, or says how long it has to be.
///
/// # Safety
/// `count` has to be null or valid for reads and writes, `list` valid for writes of that many, or null with a count
/// of 0.
unsafe fn fill<T>(found: Result<Vec<T>, i32>, count: *mut u32, list: *mut T) -> i32 {
    status(found.and_then(|found| {
        if count.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: as the caller says, and it is not null.
        let room = unsafe { std::mem::replace(&mut *count, found.len() as u32) } as usize;
        if found.len() > room {
            return Err(INSUFFICIENT_SIZE);
        }
        if list.is_null() && !found.is_empty() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: there is room for them.
        found.into_iter().enumerate().for_each(|(at, process)| unsafe { list.add(at).write(process) });
        Ok(())
    }))
}

macro_rules! lists {
    ($($name:ident: $list:ident, $process:ident;)+) => {$(
        /// # Safety
        /// `count` has to be null or valid for reads and writes, `list` valid for writes of that many, or null with 0.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(own: usize, count: *mut u32, list: *mut $process) -> i32 {
            // SAFETY: as the caller says.
            unsafe { fill($list(own), count, list) }
        }
    )+};
}

fn compute_v1(own: usize) -> Result<Vec<ProcessV1>, i32> {
    Ok(processes(own)?.into_iter().map(|(id, used)| ProcessV1 { id, used }).collect())
}

fn compute(own: usize) -> Result<Vec<ProcessV2>, i32> {
    Ok(processes(own)?.into_iter().map(|(id, used)| ProcessV2 { id, used, instances: [u32::MAX; 2] }).collect())
}

/// No process draws, and none goes through MPS.
fn none<T>(own: usize) -> Result<Vec<T>, i32> {
    device_of(own).map(|_| Vec::new())
}

lists! {
    nvmlDeviceGetComputeRunningProcesses: compute_v1, ProcessV1;
    nvmlDeviceGetComputeRunningProcesses_v2: compute, ProcessV2;
    nvmlDeviceGetComputeRunningProcesses_v3: compute, ProcessV2;
    nvmlDeviceGetGraphicsRunningProcesses: none, ProcessV1;
    nvmlDeviceGetGraphicsRunningProcesses_v2: none, ProcessV2;
    nvmlDeviceGetGraphicsRunningProcesses_v3: none, ProcessV2;
    nvmlDeviceGetMPSComputeRunningProcesses_v3: none, ProcessV2;
}

/// Each device reaches each other one: 0 is "ok" (`nvmlGpuP2PStatus_t`).
///
/// # Safety
/// `place` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetP2PStatus(own: usize, other: usize, _kind: i32, place: *mut i32) -> i32 {
    // SAFETY: as the caller says.
    unsafe { answer(place, device_of(own).and_then(|_| device_of(other)).map(|_| 0)) }
}

macro_rules! without {
    ($($name:ident),+) => {$(
        /// These devices have no NVLink fabric.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(own: usize) -> i32 {
            status(device_of(own).and(Err(NOT_SUPPORTED)))
        }
    )+};
}

without! {
    nvmlDeviceGetGpuFabricInfo, nvmlDeviceGetGpuFabricInfoV, nvmlDeviceGetNvLinkRemoteDeviceType,
    nvmlDeviceGetNvLinkRemotePciInfo_v2, nvmlDeviceGetNvLinkState
}
