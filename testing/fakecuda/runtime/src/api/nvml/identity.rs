//! Which devices there are, and what they are called.

use std::ffi::{CStr, c_char};

use super::{FIRST_HANDLE, GPU_IS_LOST, INVALID_ARGUMENT, NOT_FOUND, answer, answer_text, device_of, ready};
use crate::faults;
use crate::nvml::{Figure, all};
use crate::world::world;

/// `nvmlPciInfo_t`, whose bus numbers are those of `cudaDeviceGetPCIBusId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PciInfo {
    legacy: [u8; 16],
    domain: u32,
    bus: u32,
    device: u32,
    id: u32,
    subsystem: u32,
    text: [u8; 32],
}

fn uuid(device: u32) -> String {
    // The 16 bytes of `cudaDeviceProp::uuid`: the first one is the device's number from 1.
    format!("GPU-{:02x}000000-0000-0000-0000-000000000000", device + 1)
}

fn count() -> Result<u32, i32> {
    ready().map(|()| world().devices.len() as u32)
}

/// The handle of the device of this number. One that is lost has none.
fn handle(device: u32) -> Result<usize, i32> {
    if device >= count()? {
        return Err(INVALID_ARGUMENT);
    }
    faults::lost(device as usize).map_err(|_| GPU_IS_LOST)?;
    Ok(FIRST_HANDLE + device as usize)
}

/// # Safety
/// `text` has to be null or a text that ends with a zero byte.
unsafe fn text<'a>(text: *const c_char) -> Result<&'a str, i32> {
    if text.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: as the caller says, and it is not null.
    unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| INVALID_ARGUMENT)
}

/// `DOMAIN:BUS:DEVICE.0` in hexadecimal; the domain may be left out.
fn bus_of(text: &str) -> Option<(u32, u32, u32)> {
    let text = text.strip_suffix(".0").unwrap_or(text);
    let mut parts = text.rsplit(':').map(|part| u32::from_str_radix(part, 16).ok());
    let (device, bus) = (parts.next()??, parts.next()??);
    Some((parts.next().unwrap_or(Some(0))?, bus, device))
}

macro_rules! versions {
    ($($name:ident: $work:ident, $first:ty, $answer:ty;)+) => {$(
        /// # Safety
        /// `first` has to be a number, or null or a text that ends with a zero byte; `place` null or valid for writes.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(first: $first, place: *mut $answer) -> i32 {
            // SAFETY: as the caller says.
            unsafe { $work(first, place) }
        }
    )+};
}

/// # Safety
/// `place` has to be null or valid for writes.
unsafe fn by_index(device: u32, place: *mut usize) -> i32 {
    // SAFETY: as the caller says.
    unsafe { answer(place, handle(device)) }
}

/// # Safety
/// `bus` has to be null or a text that ends with a zero byte, `place` null or valid for writes.
unsafe fn by_bus(bus: *const c_char, place: *mut usize) -> i32 {
    // SAFETY: as the caller says.
    let found = unsafe { text(bus) }.and_then(|text| {
        let (domain, bus, slot) = bus_of(text).ok_or(INVALID_ARGUMENT)?;
        let device = bus.checked_sub(1).filter(|_| domain == 0 && slot == 0).ok_or(NOT_FOUND)?;
        if device < count()? { handle(device) } else { Err(NOT_FOUND) }
    });
    // SAFETY: as the caller says.
    unsafe { answer(place, found) }
}

/// # Safety
/// `place` has to be null or valid for writes.
unsafe fn pci_info(own: usize, place: *mut PciInfo) -> i32 {
    let info = device_of(own).map(|device| {
        let mut info =
            PciInfo { legacy: [0; 16], domain: 0, bus: device + 1, device: 0, id: 0, subsystem: 0, text: [0; 32] };
        let [short, long] = [format!("0000:{:02X}:00.0", device + 1), format!("00000000:{:02X}:00.0", device + 1)];
        info.legacy[..short.len()].copy_from_slice(short.as_bytes());
        info.text[..long.len()].copy_from_slice(long.as_bytes());
        info
    });
    // SAFETY: as the caller says.
    unsafe { answer(place, info) }
}

versions! {
    nvmlDeviceGetHandleByIndex: by_index, u32, usize;
    nvmlDeviceGetHandleByIndex_v2: by_index, u32, usize;
    nvmlDeviceGetHandleByPciBusId: by_bus, *const c_char, usize;
    nvmlDeviceGetHandleByPciBusId_v2: by_bus, *const c_char, usize;
    nvmlDeviceGetPciInfo_v2: pci_info, usize, PciInfo;
    nvmlDeviceGetPciInfo_v3: pci_info, usize, PciInfo;
}

/// # Safety
/// `place` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCount(place: *mut u32) -> i32 {
    // SAFETY: as the caller says.
    unsafe { answer(place, count()) }
}

/// # Safety
/// `place` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCount_v2(place: *mut u32) -> i32 {
    // SAFETY: as the caller says.
    unsafe { answer(place, count()) }
}

/// # Safety
/// `own` has to be null or a text that ends with a zero byte, `place` null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByUUID(own: *const c_char, place: *mut usize) -> i32 {
    // SAFETY: as the caller says.
    let found = unsafe { text(own) }.and_then(|text| {
        let device = (0..count()?).find(|device| uuid(*device) == text).ok_or(NOT_FOUND)?;
        handle(device)
    });
    // SAFETY: as the caller says.
    unsafe { answer(place, found) }
}

macro_rules! texts {
    ($($name:ident: $figure:ident, $text:expr;)+) => {$(
        /// # Safety
        /// `place` has to be null or valid for writes of `length` bytes.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(own: usize, place: *mut c_char, length: u32) -> i32 {
            let text = device_of(own).and_then(|device| all().get(device, Figure::$figure).map(|_| $text(device)));
            // SAFETY: as the caller says.
            unsafe { answer_text(place, length, text) }
        }
    )+};
}

texts! {
    nvmlDeviceGetName: Name, |_| "fake H100 (no GPU)".to_owned();
    nvmlDeviceGetUUID: Uuid, uuid;
}

/// # Safety
/// `place` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetIndex(own: usize, place: *mut u32) -> i32 {
    // SAFETY: as the caller says.
    unsafe { answer(place, device_of(own)) }
}

/// # Safety
/// `place` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMinorNumber(own: usize, place: *mut u32) -> i32 {
    // SAFETY: as the caller says.
    unsafe { answer(place, device_of(own)) }
}

/// # Safety
/// Both have to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCudaComputeCapability(own: usize, major: *mut i32, minor: *mut i32) -> i32 {
    let device = device_of(own);
    // SAFETY: as the caller says.
    let [major, minor] = unsafe { [answer(major, device.map(|_| 9)), answer(minor, device.map(|_| 0))] };
    major.max(minor)
}

/// # Safety
/// `place` has to be null or valid for writes of `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetDriverVersion(place: *mut c_char, length: u32) -> i32 {
    // SAFETY: as the caller says.
    unsafe { answer_text(place, length, ready().map(|()| "580.0.fake".to_owned())) }
}

/// # Safety
/// `place` has to be null or valid for writes of `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetNVMLVersion(place: *mut c_char, length: u32) -> i32 {
    // SAFETY: as the caller says.
    unsafe { answer_text(place, length, ready().map(|()| "13.580.0.fake".to_owned())) }
}

/// # Safety
/// `place` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetCudaDriverVersion(place: *mut i32) -> i32 {
    // SAFETY: as the caller says.
    unsafe { answer(place, ready().map(|()| 13_000)) }
}

/// # Safety
/// `place` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetCudaDriverVersion_v2(place: *mut i32) -> i32 {
    // SAFETY: as the caller says.
    unsafe { nvmlSystemGetCudaDriverVersion(place) }
}
