//! A profiler's course: buffers, records, and what they say. One test, because the trace is shared by the process.

use std::cell::RefCell;

use super::*;
use crate::api::memory::{cudaFree, cudaMalloc, cudaMemset};
use crate::trace::records::{EXTERNAL_CORRELATION, MEMSET, RUNTIME};
use crate::trace::{call, is_traced};

/// Room for a call's record and what comes before it, not for more: several buffers are needed.
const SIZE: usize = 100;

thread_local! {
    /// The records of each buffer that came back: kind, and the numbers that the test looks at.
    static BUFFERS: RefCell<Vec<Vec<(u32, u64)>>> = const { RefCell::new(Vec::new()) };
}

extern "C" fn ask(address: *mut *mut u8, size: *mut usize, max_records: *mut usize) {
    // SAFETY: the caller gives three places.
    unsafe { (*address, *size, *max_records) = (Box::leak(Box::new([0_u64; 13])).as_mut_ptr().cast(), SIZE, 0) };
}

extern "C" fn give(_context: usize, _stream: u32, buffer: *mut u8, _size: usize, bytes: usize) {
    let (mut record, mut records) = (std::ptr::null_mut(), Vec::new());
    // SAFETY: the buffer holds that many bytes of records; the numbers are at the offsets of cupti_activity.h.
    unsafe {
        let thread = libc::pthread_self() as u32;
        while cuptiActivityGetNextRecord(buffer, bytes, &mut record) == 0 {
            let at = |offset: usize| record.add(offset).cast::<u32>().read_unaligned();
            let kind = at(0);
            // Other tests of this process may call functions meanwhile.
            if kind == RUNTIME && at(28) != thread {
                continue;
            }
            let number = match kind {
                EXTERNAL_CORRELATION => at(8),
                RUNTIME => at(4),
                _ => at(8),
            };
            records.push((kind, number.into()));
        }
        drop(Box::from_raw(buffer.cast::<[u64; 13]>()));
    }
    BUFFERS.with_borrow_mut(|all| all.push(records));
}

#[test]
fn records_come_back_in_buffers_with_the_numbers_of_what_called() {
    const CUDA_MEMSET: u64 = 49;
    let (mut block, mut subscriber, mut last) = (0, 0, 0);
    // SAFETY: all pointers are to variables of their types.
    unsafe {
        assert_eq!(cudaMalloc(&mut block, 64), 0);
        assert_eq!(cuptiSubscribe(&mut subscriber, 0, std::ptr::null_mut()), 0);
        assert_eq!(cuptiSubscribe(&mut subscriber, 0, std::ptr::null_mut()), MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED);
        assert_eq!(cuptiActivityRegisterCallbacks(None, Some(give)), INVALID_PARAMETER);
        assert_eq!(cuptiActivityRegisterCallbacks(Some(ask), Some(give)), 0);
        assert_eq!((cuptiActivityEnable(0), cuptiActivityEnable(KINDS)), (INVALID_KIND, INVALID_KIND));
        assert!(!is_traced());
        assert_eq!([EXTERNAL_CORRELATION, RUNTIME, MEMSET].map(|kind| cuptiActivityEnable(kind)), [0; 3]);
        assert!(is_traced());
        assert_eq!(cuptiActivityPushExternalCorrelationId(9, 1), INVALID_PARAMETER);
        assert_eq!(cuptiActivityPushExternalCorrelationId(1, 70), 0);
        assert_eq!(cuptiActivityPushExternalCorrelationId(1, 71), 0);
        // The entry of the linked libraries would tell of the call.
        call("cudaMemset", block, 0);
        assert_eq!(cudaMemset(block, 0, 48), 0);
        assert_eq!(cuptiActivityPopExternalCorrelationId(1, &mut last), 0);
        assert_eq!((last, cuptiActivityPopExternalCorrelationId(3, &mut last)), (71, QUEUE_EMPTY));
        assert_eq!(cuptiActivityEnableRuntimeApi(CUDA_MEMSET as u32, 0), 0);
        call("cudaMemset", block, 0);
        assert_eq!(cuptiActivityFlushAll(0), 0);
        let buffers = BUFFERS.with_borrow_mut(std::mem::take);
        assert!(buffers.len() > 1, "{buffers:?} do not fit one buffer");
        let records = [(EXTERNAL_CORRELATION, 71), (RUNTIME, CUDA_MEMSET), (MEMSET, 48)];
        assert_eq!(buffers.concat(), records, "the innermost number of each kind");
        assert_eq!(cuptiFinalize(), 0);
        assert!(!is_traced());
        call("cudaMemset", block, 0);
        assert_eq!(cuptiActivityFlushAll(0), 0);
        assert!(BUFFERS.with_borrow(Vec::is_empty));
        assert_eq!(
            (cuptiUnsubscribe(subscriber), cuptiActivityPopExternalCorrelationId(1, &mut last)),
            (INVALID_PARAMETER, 0)
        );
        assert_eq!(cudaFree(block), 0);
    }
}
