//! Hopper's counters (GPM): two samples, and the metrics between them.

use super::{ARGUMENT_VERSION_MISMATCH, INVALID_ARGUMENT, NOT_SUPPORTED, answer, device_of, ready, status};
use crate::nvml::{Figure, all};

/// `nvmlGpmSupport_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Support {
    version: u32,
    is_supported: u32,
}

/// `nvmlGpmMetric_t`; its names stay null.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Metric {
    id: u32,
    status: i32,
    value: f64,
    names: [usize; 3],
}

/// `nvmlGpmMetricsGet_t`, whose list is longer or shorter with the version of NVML: only `count` of it are used.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Metrics {
    version: u32,
    count: u32,
    samples: [*mut Option<u32>; 2],
    metrics: [Metric; 0],
}

/// The version of both structures.
const VERSION: u32 = 1;
/// `NVML_GPM_METRIC_MAX` of the shortest list, that of NVML 12.
const MOST: u32 = 98;

fn has_counters(device: u32) -> Result<bool, i32> {
    all().get(device, Figure::Gpm).map(|gpm| gpm > 0)
}

/// # Safety
/// `place` has to be null or valid for reads and writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpmQueryDeviceSupport(own: usize, place: *mut Support) -> i32 {
    // SAFETY: as the caller says.
    if !place.is_null() && unsafe { (*place).version } != VERSION {
        return ARGUMENT_VERSION_MISMATCH;
    }
    let has = device_of(own).and_then(has_counters);
    // SAFETY: as the caller says.
    unsafe { answer(place, has.map(|has| Support { version: VERSION, is_supported: u32::from(has) })) }
}

/// A sample is the number of its device, once there is one.
///
/// # Safety
/// `place` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpmSampleAlloc(place: *mut *mut Option<u32>) -> i32 {
    if place.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: as the caller says.
    unsafe { answer(place, ready().map(|()| Box::into_raw(Box::new(None)))) }
}

/// # Safety
/// `sample` has to be null or one of `nvmlGpmSampleAlloc`, and is not used after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpmSampleFree(sample: *mut Option<u32>) -> i32 {
    if sample.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: as the caller says, and it is not null.
    drop(unsafe { Box::from_raw(sample) });
    0
}

/// # Safety
/// `sample` has to be null or one of `nvmlGpmSampleAlloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpmSampleGet(own: usize, sample: *mut Option<u32>) -> i32 {
    let device = device_of(own).and_then(|device| match has_counters(device) {
        Ok(true) => Ok(Some(device)),
        Ok(false) => Err(NOT_SUPPORTED),
        Err(error) => Err(error),
    });
    // SAFETY: as the caller says.
    unsafe { answer(sample, device) }
}

/// # Safety
/// `request` has to be null or valid for reads and writes, with samples of `nvmlGpmSampleAlloc` and `count` metrics.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpmMetricsGet(request: *mut Metrics) -> i32 {
    if request.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: as the caller says, and it is not null.
    let Metrics { version, count, samples, .. } = unsafe { *request };
    if version != VERSION {
        return ARGUMENT_VERSION_MISMATCH;
    }
    if count > MOST || samples.iter().any(|sample| sample.is_null()) {
        return INVALID_ARGUMENT;
    }
    // SAFETY: both are samples, as the caller says.
    let [before, after] = samples.map(|sample| unsafe { *sample });
    let device = match (before, after) {
        (Some(before), Some(after)) if before == after => after,
        _ => return INVALID_ARGUMENT,
    };
    // SAFETY: the list follows, as the caller says.
    let metrics = unsafe {
        let first = (&raw mut (*request).metrics).cast::<Metric>();
        std::slice::from_raw_parts_mut(first, count as usize)
    };
    for metric in metrics {
        let figure = match metric.id {
            5 => Ok(Figure::TensorUtilization),
            60 => Ok(Figure::NvlinkReceived),
            61 => Ok(Figure::NvlinkSent),
            _ => Err(NOT_SUPPORTED),
        };
        let value = figure.and_then(|figure| all().get(device, figure));
        (metric.status, metric.value) = (status(value.map(drop)), value.unwrap_or(0) as f64);
    }
    status(ready())
}
