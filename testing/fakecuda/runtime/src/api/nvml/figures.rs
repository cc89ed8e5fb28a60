//! Memory, load, clocks, power and temperature of a device.

use super::{ARGUMENT_VERSION_MISMATCH, INVALID_ARGUMENT, NOT_SUPPORTED, answer, device_of};
use crate::nvml::{Figure, all};
use crate::world::world;

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MemoryV2 {
    version: u32,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

/// `nvmlTemperature_v1_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct TemperatureV1 {
    version: u32,
    sensor: u32,
    temperature: i32,
}

/// `nvmlUtilization_t`, in percent.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Utilization {
    gpu: u32,
    memory: u32,
}

/// `NVML_STRUCT_VERSION` of nvml.h: the size, and the version in the highest byte.
pub fn version<T>(number: u32) -> u32 {
    size_of::<T>() as u32 | number << 24
}

fn figure(own: usize, figure: Figure) -> Result<u64, i32> {
    device_of(own).and_then(|device| all().get(device, figure))
}

fn figure_u32(own: usize, wanted: Figure) -> Result<u32, i32> {
    figure(own, wanted).map(|value| u32::try_from(value).unwrap_or(u32::MAX))
}

fn memory(own: usize) -> Result<Memory, i32> {
    let device = device_of(own)?;
    let [_, others] = {
        let figures = all();
        [figures.get(device, Figure::Memory)?, figures.get(device, Figure::OtherMemory)?]
    };
    let (used, total) = world().devices.get(device as usize).ok_or(INVALID_ARGUMENT)?.memory.usage();
    let total = total as u64;
    let used = (used as u64).saturating_add(others).min(total);
    Ok(Memory { total, free: total - used, used })
}

/// # Safety
/// `place` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo(own: usize, place: *mut Memory) -> i32 {
    // SAFETY: as the caller says.
    unsafe { answer(place, memory(own)) }
}

/// # Safety
/// `place` has to be null or valid for reads and writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(own: usize, place: *mut MemoryV2) -> i32 {
    if place.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: as the caller says, and it is not null.
    let version_given = unsafe { (*place).version };
    let info = memory(own).and_then(|Memory { total, free, used }| {
        let version = version::<MemoryV2>(2);
        if version_given == version {
            Ok(MemoryV2 { version, total, reserved: 0, free, used })
        } else {
            Err(ARGUMENT_VERSION_MISMATCH)
        }
    });
    // SAFETY: as the caller says.
    unsafe { answer(place, info) }
}

/// # Safety
/// `place` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetUtilizationRates(own: usize, place: *mut Utilization) -> i32 {
    let rates = figure_u32(own, Figure::Utilization)
        .and_then(|gpu| figure_u32(own, Figure::MemoryUtilization).map(|memory| Utilization { gpu, memory }));
    // SAFETY: as the caller says.
    unsafe { answer(place, rates) }
}

/// Only the sensor of the GPU's chip (0) exists.
///
/// # Safety
/// `place` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetTemperature(own: usize, sensor: u32, place: *mut u32) -> i32 {
    let value = if sensor == 0 { figure_u32(own, Figure::Temperature) } else { Err(INVALID_ARGUMENT) };
    // SAFETY: as the caller says.
    unsafe { answer(place, value) }
}

/// # Safety
/// `place` has to be null or valid for reads and writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetTemperatureV(own: usize, place: *mut TemperatureV1) -> i32 {
    if place.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: as the caller says, and it is not null.
    let given = unsafe { *place };
    let value = match (given.version == version::<TemperatureV1>(1), given.sensor) {
        (false, _) => Err(ARGUMENT_VERSION_MISMATCH),
        (true, 0) => figure_u32(own, Figure::Temperature),
        (true, _) => Err(INVALID_ARGUMENT),
    };
    // SAFETY: as the caller says.
    unsafe { answer(place, value.map(|degrees| TemperatureV1 { temperature: degrees as i32, ..given })) }
}

/// `nvmlClockType_t`.
fn clock(own: usize, kind: u32, clocks: [Figure; 4]) -> Result<u32, i32> {
    let clock = *clocks.get(kind as usize).ok_or(INVALID_ARGUMENT)?;
    figure_u32(own, clock)
}

const NOW: [Figure; 4] = [Figure::GraphicsClock, Figure::SmClock, Figure::MemoryClock, Figure::VideoClock];
const MOST: [Figure; 4] = [Figure::MaxGraphicsClock, Figure::MaxSmClock, Figure::MaxMemoryClock, Figure::MaxVideoClock];

/// # Safety
/// `place` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetClockInfo(own: usize, kind: u32, place: *mut u32) -> i32 {
    // SAFETY: as the caller says.
    unsafe { answer(place, clock(own, kind, NOW)) }
}

/// # Safety
/// `place` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMaxClockInfo(own: usize, kind: u32, place: *mut u32) -> i32 {
    // SAFETY: as the caller says.
    unsafe { answer(place, clock(own, kind, MOST)) }
}

/// # Safety
/// `place` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetClock(own: usize, kind: u32, id: u32, place: *mut u32) -> i32 {
    // The current one, and the largest that a customer may choose; others cannot be asked for.
    let value = match id {
        0 => clock(own, kind, NOW),
        3 => clock(own, kind, MOST),
        1 | 2 => device_of(own).and(Err(NOT_SUPPORTED)),
        _ => Err(INVALID_ARGUMENT),
    };
    // SAFETY: as the caller says.
    unsafe { answer(place, value) }
}

macro_rules! numbers {
    ($($name:ident: $figure:ident, $type:ty;)+) => {$(
        /// # Safety
        /// `place` has to be null or valid for writes.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(own: usize, place: *mut $type) -> i32 {
            let value = figure(own, Figure::$figure).map(|value| <$type>::try_from(value).unwrap_or(<$type>::MAX));
            // SAFETY: as the caller says.
            unsafe { answer(place, value) }
        }
    )+};
}

numbers! {
    nvmlDeviceGetPowerUsage: Power, u32;
    nvmlDeviceGetEnforcedPowerLimit: PowerLimit, u32;
    nvmlDeviceGetPowerManagementLimit: PowerLimit, u32;
    nvmlDeviceGetTotalEnergyConsumption: Energy, u64;
    nvmlDeviceGetPerformanceState: PerformanceState, u32;
    nvmlDeviceGetPowerState: PerformanceState, u32;
    nvmlDeviceGetCurrentClocksThrottleReasons: ThrottleReasons, u64;
    nvmlDeviceGetCurrentClocksEventReasons: ThrottleReasons, u64;
}

/// All reasons of nvml.h.
const REASONS: u64 = 0x1ff;

/// # Safety
/// `place` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetSupportedClocksThrottleReasons(own: usize, place: *mut u64) -> i32 {
    // SAFETY: as the caller says.
    unsafe { answer(place, device_of(own).map(|_| REASONS)) }
}

/// # Safety
/// `place` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetSupportedClocksEventReasons(own: usize, place: *mut u64) -> i32 {
    // SAFETY: as the caller says.
    unsafe { nvmlDeviceGetSupportedClocksThrottleReasons(own, place) }
}

/// # Safety
/// Both have to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetPowerManagementLimitConstraints(own: usize, min: *mut u32, max: *mut u32) -> i32 {
    // SAFETY: as the caller says.
    let [min, max] = unsafe {
        [answer(min, figure_u32(own, Figure::MinPowerLimit)), answer(max, figure_u32(own, Figure::MaxPowerLimit))]
    };
    min.max(max)
}

/// # Safety
/// `place` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetPcieThroughput(own: usize, counter: u32, place: *mut u32) -> i32 {
    let value = match counter {
        0 => figure_u32(own, Figure::PcieSent),
        1 => figure_u32(own, Figure::PcieReceived),
        _ => Err(INVALID_ARGUMENT),
    };
    // SAFETY: as the caller says.
    unsafe { answer(place, value) }
}
