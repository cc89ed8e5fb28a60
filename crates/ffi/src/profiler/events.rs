//! A trace's events, copied from the C++ side in one call.

use std::ptr;
use std::sync::Arc;

use crate::error::{Error, check};
use crate::raw_profiler as raw;

/// One event of a trace, as libtorch reports it.
#[derive(Clone, Debug)]
pub struct Event {
    /// The operator, kernel or scope.
    pub name: Arc<str>,
    /// The operator's overload; empty unless [`overload_names`](super::Options::overload_names) is set.
    pub overload_name: Arc<str>,
    /// In nanoseconds since the Unix epoch.
    pub start_ns: i64,
    /// In nanoseconds since the Unix epoch.
    pub end_ns: i64,
    /// The event's own number.
    pub correlation_id: u64,
    /// The number of the operator that launched it; 0 for operators themselves.
    pub linked_correlation_id: u64,
    /// libtorch's number of the thread in which it started.
    pub start_thread: u64,
    /// libtorch's number of the thread in which it ended.
    pub end_thread: u64,
    /// Of a backward operator: the thread of its forward operator.
    pub forward_thread: u64,
    /// The number that a forward operator and its backward operator share; -1 for others.
    pub sequence_number: i64,
    /// Floating point operations, where libtorch can compute them.
    pub flops: u64,
    /// Of a `[memory]` event: bytes allocated, or freed if negative.
    pub bytes: i64,
    /// The system's thread id, or the number of a stream.
    pub resource: i64,
    /// `c10::DeviceType`.
    pub device_type: i32,
    /// The GPU; of events on the host: the process.
    pub device_index: i32,
    /// `libkineto::ActivityType`.
    pub activity: u8,
    /// `at::RecordScope`.
    pub scope: u8,
    /// Whether it may end in another thread.
    pub is_async: bool,
    /// Whether the event is internal and should not be shown to users.
    pub is_hidden: bool,
    /// The operator's inputs, where shapes are recorded.
    pub inputs: Vec<Input>,
}

/// An input of an operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// `float`, `c10::BFloat16`, `Scalar`, ..; empty where there is none.
    pub dtype: Arc<str>,
    /// Of a tensor; empty for everything else.
    pub shape: Vec<i64>,
}

/// The C++ side's arrays, freed when dropped.
struct Arrays(*mut raw::Events);

impl Drop for Arrays {
    fn drop(&mut self) {
        // SAFETY: made by `od_trace_events` and not used after this.
        unsafe { raw::od_events_free(self.0) }
    }
}

/// `trace` must be alive.
pub(super) fn copy(trace: *const raw::Trace) -> Result<Vec<Event>, Error> {
    let mut out = ptr::null_mut();
    let mut view = raw::EventsView {
        events: ptr::null(),
        n_events: 0,
        inputs: ptr::null(),
        n_inputs: 0,
        text: ptr::null(),
        text_ends: ptr::null(),
        n_strings: 0,
    };
    // SAFETY: the caller keeps the trace alive; `out` and `view` live through the call.
    check(|err| unsafe { raw::od_trace_events(trace, &mut out, &mut view, err) })?;
    let _arrays = Arrays(out);
    // SAFETY: the arrays are as long as the view says, plain numbers, and alive until `_arrays` is dropped.
    let (events, inputs, ends) = unsafe {
        (slice(view.events, view.n_events), slice(view.inputs, view.n_inputs), slice(view.text_ends, view.n_strings))
    };
    let length = ends.last().map_or(0, |end| to_usize(*end));
    // SAFETY: as above; the last string ends where the text does.
    let strings = strings(unsafe { slice(view.text, length) }, ends);
    Ok(events.iter().map(|event| read(event, inputs, &strings)).collect())
}

/// # Safety
/// `data` points to `length` values that outlive the slice; it may be null when there are none.
unsafe fn slice<'a, T>(data: *const T, length: usize) -> &'a [T] {
    if length == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(data, length) }
}

fn strings(text: &[u8], ends: &[u64]) -> Vec<Arc<str>> {
    let mut begin = 0;
    let each = ends.iter().map(|end| {
        let bytes = &text[begin..to_usize(*end)];
        begin = to_usize(*end);
        Arc::from(String::from_utf8_lossy(bytes))
    });
    each.collect()
}

fn read(event: &raw::Event, inputs: &[i64], strings: &[Arc<str>]) -> Event {
    let string = |number: u32| strings[number as usize].clone();
    let mut rest = inputs[to_usize(event.inputs)..].iter();
    let mut next = || rest.next().copied().unwrap_or_default();
    let inputs = (0..event.n_inputs).map(|_| {
        let dtype = strings[next() as usize].clone();
        let shape = (0..next()).map(|_| next()).collect();
        Input { dtype, shape }
    });
    Event {
        inputs: inputs.collect(),
        name: string(event.name),
        overload_name: string(event.overload),
        start_ns: event.start_ns,
        end_ns: event.end_ns,
        correlation_id: event.correlation_id,
        linked_correlation_id: event.linked_correlation_id,
        start_thread: event.start_thread,
        end_thread: event.end_thread,
        forward_thread: event.forward_thread,
        sequence_number: event.sequence_number,
        flops: event.flops,
        bytes: event.bytes,
        resource: event.resource,
        device_type: event.device_type,
        device_index: event.device_index,
        activity: event.activity,
        scope: event.scope,
        is_async: event.is_async != 0,
        is_hidden: event.is_hidden != 0,
    }
}

/// An index into an array in memory.
fn to_usize(place: u64) -> usize {
    usize::try_from(place).expect("an index of memory fits")
}
