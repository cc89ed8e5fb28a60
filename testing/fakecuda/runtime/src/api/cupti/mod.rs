//! libcupti: the functions that kineto, libtorch's profiler, calls.

use std::ffi::{CStr, c_char, c_void};

use crate::trace::records::{KINDS, length};
use crate::trace::{Ask, EXTERNAL, Give, Trace, all, ask_for_buffer, change};

const INVALID_PARAMETER: i32 = 1;
const MAX_LIMIT_REACHED: i32 = 12;
const QUEUE_EMPTY: i32 = 18;
const INVALID_KIND: i32 = 21;
const MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED: i32 = 39;
/// `CUPTI_API_VERSION` of CUDA 13.0.
const VERSION: u32 = 130_001;
/// `CUPTI_EXTERNAL_CORRELATION_KIND_SIZE`.
const EXTERNAL_KINDS: u32 = 6;
const SUBSCRIBER: usize = 16;

fn status(is_valid: bool, otherwise: i32) -> i32 {
    if is_valid { 0 } else { otherwise }
}

/// # Safety
/// `version` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiGetVersion(version: *mut u32) -> i32 {
    if version.is_null() {
        return INVALID_PARAMETER;
    }
    // SAFETY: as the caller says, and it is not null.
    unsafe { *version = VERSION };
    0
}

/// # Safety
/// `text` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiGetResultString(result: i32, text: *mut *const c_char) -> i32 {
    if text.is_null() {
        return INVALID_PARAMETER;
    }
    let own: &CStr = match result {
        0 => c"CUPTI_SUCCESS",
        INVALID_PARAMETER => c"CUPTI_ERROR_INVALID_PARAMETER",
        MAX_LIMIT_REACHED => c"CUPTI_ERROR_MAX_LIMIT_REACHED",
        QUEUE_EMPTY => c"CUPTI_ERROR_QUEUE_EMPTY",
        INVALID_KIND => c"CUPTI_ERROR_INVALID_KIND",
        MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED => c"CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED",
        _ => c"CUPTI_ERROR_UNKNOWN",
    };
    // SAFETY: as the caller says, and it is not null.
    unsafe { *text = own.as_ptr() };
    0
}

/// One at a time. Its function is not called: kineto wants to hear of new contexts, but does without.
///
/// # Safety
/// `subscriber` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiSubscribe(subscriber: *mut usize, _function: usize, _data: *mut c_void) -> i32 {
    if subscriber.is_null() {
        return INVALID_PARAMETER;
    }
    if change(|trace| std::mem::replace(&mut trace.has_subscriber, true)) {
        return MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED;
    }
    // SAFETY: as the caller says, and it is not null.
    unsafe { *subscriber = SUBSCRIBER };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuptiUnsubscribe(subscriber: usize) -> i32 {
    let had_one = change(|trace| std::mem::replace(&mut trace.has_subscriber, false));
    status(had_one && subscriber == SUBSCRIBER, INVALID_PARAMETER)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuptiEnableCallback(_enable: u32, subscriber: usize, _domain: i32, _function: u32) -> i32 {
    status(subscriber == SUBSCRIBER, INVALID_PARAMETER)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuptiEnableDomain(_enable: u32, subscriber: usize, _domain: i32) -> i32 {
    status(subscriber == SUBSCRIBER, INVALID_PARAMETER)
}

/// Ends everything, except for what kineto registers once: the names, and the clock.
#[unsafe(no_mangle)]
pub extern "C" fn cuptiFinalize() -> i32 {
    change(|trace| {
        trace.kinds.clear();
        trace.unwanted_functions.clear();
        trace.records.clear();
        (trace.has_subscriber, trace.buffer, trace.ask, trace.give) = (false, None, None, None);
    });
    0
}

/// Kinds without records here, such as the driver's functions and overhead, can be enabled.
#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityEnable(kind: u32) -> i32 {
    let is_valid = (1..KINDS).contains(&kind);
    if is_valid {
        change(|trace| trace.kinds.insert(kind));
    }
    status(is_valid, INVALID_KIND)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityDisable(kind: u32) -> i32 {
    let is_valid = (1..KINDS).contains(&kind);
    if is_valid {
        change(|trace| trace.kinds.remove(&kind));
    }
    status(is_valid, INVALID_KIND)
}

/// Whether calls of a function of the runtime are recorded; all are at first.
#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityEnableRuntimeApi(function: u32, enable: u8) -> i32 {
    change(|trace| match enable {
        0 => trace.unwanted_functions.insert(function),
        _ => trace.unwanted_functions.remove(&function),
    });
    0
}

/// The driver's functions have no records here.
#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityEnableDriverApi(_function: u32, _enable: u8) -> i32 {
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityEnableCudaEventDeviceTimestamps(_enable: u8) -> i32 {
    0
}

/// Sizes of buffers that are not kept on a device here.
#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivitySetAttribute(_attribute: i32, _size: *mut usize, _value: *mut c_void) -> i32 {
    0
}

/// # Safety
/// `dropped` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiActivityGetNumDroppedRecords(_context: usize, _stream: u32, dropped: *mut usize) -> i32 {
    if dropped.is_null() {
        return INVALID_PARAMETER;
    }
    // SAFETY: as the caller says, and it is not null.
    unsafe { *dropped = change(|trace| std::mem::take(&mut trace.dropped)) };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityRegisterCallbacks(ask: Option<Ask>, give: Option<Give>) -> i32 {
    if ask.is_none() || give.is_none() {
        return INVALID_PARAMETER;
    }
    change(|trace| (trace.ask, trace.give) = (ask, give));
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityRegisterTimestampCallback(clock: Option<extern "C" fn() -> u64>) -> i32 {
    if clock.is_none() {
        return INVALID_PARAMETER;
    }
    change(|trace| trace.clock = clock);
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityPushExternalCorrelationId(kind: u32, id: u64) -> i32 {
    if !(1..EXTERNAL_KINDS).contains(&kind) {
        return INVALID_PARAMETER;
    }
    EXTERNAL.with_borrow_mut(|all| all.push((kind, id)));
    0
}

/// # Safety
/// `id` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiActivityPopExternalCorrelationId(kind: u32, id: *mut u64) -> i32 {
    if !(1..EXTERNAL_KINDS).contains(&kind) {
        return INVALID_PARAMETER;
    }
    let last = EXTERNAL.with_borrow_mut(|all| {
        let at = all.iter().rposition(|(own, _)| *own == kind)?;
        Some(all.remove(at).1)
    });
    let Some(last) = last else { return QUEUE_EMPTY };
    if !id.is_null() {
        // SAFETY: as the caller says, and it is not null.
        unsafe { *id = last };
    }
    0
}

/// Moves records into a buffer, as many as it takes. Returns how many bytes they are.
fn fill(trace: &mut Trace, address: usize, size: usize, max_records: usize) -> usize {
    let mut at = 0;
    let most = if max_records == 0 { usize::MAX } else { max_records };
    for _ in 0..most {
        if trace.records.front().is_none_or(|record| at + record.len() > size) {
            break;
        }
        let Some(record) = trace.records.pop_front() else { break };
        // SAFETY: the profiler gave a buffer of this size, and it fits into what is left.
        unsafe { std::ptr::copy_nonoverlapping(record.as_ptr(), (address + at) as *mut u8, record.len()) };
        at += record.len();
    }
    at
}

/// Gives all records to the profiler, in buffers of its own. Its functions are called without the lock.
#[unsafe(no_mangle)]
pub extern "C" fn cuptiActivityFlushAll(_flags: u32) -> i32 {
    loop {
        let (give, buffer) = {
            let mut all = all();
            let Some(give) = all.give.filter(|_| !all.records.is_empty()) else { return 0 };
            (give, all.buffer.take())
        };
        let buffer = buffer.or_else(ask_for_buffer);
        let (bytes, buffer) = {
            let mut all = all();
            let bytes = buffer.map_or(0, |it| fill(&mut all, it.address, it.size, it.max_records));
            // None, or too small for one record: the profiler does not want them.
            if bytes == 0 {
                all.dropped += all.records.len();
                all.records.clear();
            }
            (bytes, buffer)
        };
        if let Some(buffer) = buffer {
            give(0, 0, buffer.address as *mut u8, buffer.size, bytes);
        }
    }
}

/// # Safety
/// `buffer` has to be null or hold that many bytes of records, and `record` null or valid for reads and writes, with
/// null or a record of the buffer in it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuptiActivityGetNextRecord(buffer: *mut u8, bytes: usize, record: *mut *mut u8) -> i32 {
    if buffer.is_null() || record.is_null() {
        return INVALID_PARAMETER;
    }
    // SAFETY: as the caller says, and it is not null.
    let before = unsafe { *record };
    let at = if before.is_null() {
        0
    } else {
        // SAFETY: a record begins with its kind.
        let kind = unsafe { before.cast::<u32>().read_unaligned() };
        let Some(length) = length(kind) else { return INVALID_KIND };
        before as usize - buffer as usize + length
    };
    if at >= bytes {
        return MAX_LIMIT_REACHED;
    }
    // SAFETY: it is within the buffer.
    unsafe { *record = buffer.add(at) };
    0
}

#[cfg(test)]
mod tests;
