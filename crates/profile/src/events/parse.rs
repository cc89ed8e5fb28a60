//! Converts libtorch's events to a profile's: memory and kernels are assigned to the operators that they belong to.

use std::collections::HashMap;

use overdrive_ffi::profiler::{Event, Scope};

use super::event::{DeviceType, FunctionEvent, Kernel, RecordScope, averaged_name};
use super::list::{EventList, Recording};

const MEMORY: &str = "[memory]";
const OUT_OF_MEMORY: &str = "[OutOfMemory]";
/// Internals of the profiler, and operators too trivial to list.
const LEFT_OUT: [&str; 8] = [
    MEMORY,
    OUT_OF_MEMORY,
    "profiler::_record_function_enter",
    "profiler::_record_function_enter_new",
    "profiler::_record_function_exit",
    "aten::is_leaf",
    "aten::output_nr",
    "aten::_version",
];

/// `libkineto::ActivityType`'s numbers of scopes, on the host and on a device.
const USER_ANNOTATIONS: [u8; 2] = [1, 2];

/// `start_ns` is when the profile began; `scopes` are those of threads that libtorch does not record.
pub(crate) fn parse(recorded: &[Event], scopes: &[Scope], start_ns: i64, recording: Recording) -> EventList {
    let mut memory = Memory::of(recorded);
    let mut events = Vec::with_capacity(recorded.len());
    let mut linked: HashMap<u64, Vec<usize>> = HashMap::new();
    let mut frontend = Vec::new();
    for event in recorded.iter().filter(|event| !event.is_hidden && !LEFT_OUT.contains(&&*event.name)) {
        let place = events.len();
        events.push(function_event(event, start_ns, &mut memory));
        if event.linked_correlation_id > 0 {
            linked.entry(event.linked_correlation_id).or_default().push(place);
        } else {
            frontend.push(place);
        }
    }
    for place in frontend {
        if events[place].nests()
            && let Some(linked) = linked.get(&events[place].id)
        {
            assign_kernels(&mut events, place, linked);
        }
    }
    let mut next_id = events.iter().map(|event| event.id).max().unwrap_or(0) + 1;
    let left_over = memory.left_over().chain(recorded.iter().filter(|event| &*event.name == OUT_OF_MEMORY));
    for event in left_over {
        events.push(memory_event(event, next_id, start_ns));
        next_id += 1;
    }
    for scope in scopes {
        events.push(scope_event(scope, next_id, start_ns));
        next_id += 1;
    }
    EventList::new(events, recording)
}

fn function_event(event: &Event, start_ns: i64, memory: &mut Memory<'_>) -> FunctionEvent {
    let device_type = DeviceType::from_number(event.device_type);
    let (cpu_memory_usage, device_memory_usage) = match device_type {
        DeviceType::Cpu => memory.take(event.start_ns, event.end_ns),
        _ => (0, 0),
    };
    FunctionEvent {
        id: event.correlation_id,
        name: averaged_name(&event.name),
        trace_name: Some(event.name.clone()),
        overload_name: event.overload_name.clone(),
        start_ns: event.start_ns - start_ns,
        end_ns: event.end_ns - start_ns,
        thread: event.start_thread,
        fwd_thread: event.forward_thread,
        input_shapes: event.inputs.iter().map(|input| input.shape.clone()).collect(),
        input_types: event.inputs.iter().map(|input| input.dtype.clone()).collect(),
        scope: RecordScope::from_number(event.scope),
        cpu_memory_usage,
        device_memory_usage,
        is_async: event.is_async || event.start_thread != event.end_thread,
        sequence_nr: event.sequence_number,
        device_type,
        device_index: event.device_index,
        device_resource_id: event.resource,
        flops: event.flops,
        is_user_annotation: USER_ANNOTATIONS.contains(&event.activity),
        kernels: Vec::new(),
        cpu_children: Vec::new(),
        cpu_parent: None,
    }
}

/// Assigns kernels to the operator that launched them, and moves its CUDA runtime calls to its thread.
fn assign_kernels(events: &mut [FunctionEvent], operator: usize, linked: &[usize]) {
    let thread = events[operator].thread;
    for &place in linked {
        let event = &mut events[place];
        match event.device_type {
            DeviceType::Cpu => event.thread = thread,
            DeviceType::Cuda => {
                let kernel =
                    Kernel { name: event.name.clone(), device: event.device_index, duration_ns: event.elapsed_ns() };
                events[operator].kernels.push(kernel);
            }
            DeviceType::Other(_) => {}
        }
    }
}

fn memory_event(event: &Event, id: u64, start_ns: i64) -> FunctionEvent {
    let at = event.start_ns - start_ns;
    let (cpu_memory_usage, device_memory_usage) = bytes(event);
    FunctionEvent {
        id,
        trace_name: None,
        fwd_thread: event.start_thread,
        cpu_memory_usage,
        device_memory_usage,
        ..FunctionEvent::new(&event.name, event.start_thread, at, at)
    }
}

fn scope_event(scope: &Scope, id: u64, start_ns: i64) -> FunctionEvent {
    let (start, end) = (scope.start_ns - start_ns, scope.end_ns - start_ns);
    FunctionEvent {
        id,
        scope: RecordScope::User,
        device_index: i32::try_from(std::process::id()).unwrap_or_default(),
        device_resource_id: scope.thread.system_id,
        is_user_annotation: true,
        ..FunctionEvent::new(&scope.name, scope.thread.number, start, end)
    }
}

/// The bytes that a `[memory]` event allocated on the host and on a device.
fn bytes(event: &Event) -> (i64, i64) {
    // c10::DeviceType: CPU, MKLDNN and IDEEP are the host; CUDA, HIP and XPU are devices.
    match event.device_type {
        0 | 2 | 5 => (event.bytes, 0),
        1 | 6 | 12 => (0, event.bytes),
        _ => (0, 0),
    }
}

/// The `[memory]` events by time, with running sums, so that each operator's share is two look-ups.
struct Memory<'a> {
    events: Vec<&'a Event>,
    /// Sums over the events before each place.
    sums: Vec<(i64, i64)>,
    /// For each event, how many more operators cover it than the event before.
    covers: Vec<i64>,
}

impl<'a> Memory<'a> {
    fn of(recorded: &'a [Event]) -> Self {
        let mut events: Vec<&Event> = recorded.iter().filter(|event| &*event.name == MEMORY).collect();
        events.sort_by_key(|event| event.start_ns);
        let mut sum = (0, 0);
        let mut sums = vec![sum];
        for event in &events {
            let (cpu, device) = bytes(event);
            sum = (sum.0 + cpu, sum.1 + device);
            sums.push(sum);
        }
        Self { covers: vec![0; events.len() + 1], events, sums }
    }

    /// Bytes allocated on the host and on devices in a span of time, both ends included. Marks these events as covered.
    fn take(&mut self, start_ns: i64, end_ns: i64) -> (i64, i64) {
        let first = self.events.partition_point(|event| event.start_ns < start_ns);
        let end = self.events.partition_point(|event| event.start_ns <= end_ns).max(first);
        self.covers[first] += 1;
        self.covers[end] -= 1;
        (self.sums[end].0 - self.sums[first].0, self.sums[end].1 - self.sums[first].1)
    }

    /// Events that no operator covers, in libtorch's order.
    fn left_over(&self) -> impl Iterator<Item = &'a Event> {
        let covered = self.covers.iter().scan(0, |sum, cover| {
            *sum += cover;
            Some(*sum > 0)
        });
        self.events.iter().zip(covered).filter(|(_, covered)| !covered).map(|(event, _)| *event)
    }
}

/// All allocations and frees by time: device type, device index, time since the profile's start, bytes.
pub(crate) fn memory_changes(recorded: &[Event], start_ns: i64) -> Vec<(DeviceType, i32, i64, i64)> {
    let memory = recorded.iter().filter(|event| &*event.name == MEMORY);
    let mut changes: Vec<_> = memory
        .map(|event| {
            (DeviceType::from_number(event.device_type), event.device_index, event.start_ns - start_ns, event.bytes)
        })
        .collect();
    changes.sort_by_key(|(_, _, at, _)| *at);
    changes
}
