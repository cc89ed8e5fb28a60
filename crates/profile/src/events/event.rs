//! One event of a profile.

use std::sync::Arc;

/// Where an event took place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceType {
    /// The host.
    Cpu,
    /// A GPU.
    Cuda,
    /// Another, by the number of `c10::DeviceType`.
    Other(i32),
}

impl DeviceType {
    pub(crate) fn from_number(number: i32) -> Self {
        match number {
            0 => Self::Cpu,
            1 => Self::Cuda,
            other => Self::Other(other),
        }
    }
}

/// The kind of code that an event on the host is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RecordScope {
    /// An operator.
    Function,
    /// A node of the backward pass.
    BackwardFunction,
    /// A scope of the user.
    User,
    /// Another, by the number of `at::RecordScope`.
    Other(u8),
}

impl RecordScope {
    pub(crate) fn from_number(number: u8) -> Self {
        match number {
            0 => Self::Function,
            1 => Self::BackwardFunction,
            7 => Self::User,
            other => Self::Other(other),
        }
    }
}

/// Work on a device that an operator has launched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// The kernel or copy.
    pub name: Arc<str>,
    /// The GPU.
    pub device: i32,
    /// In nanoseconds.
    pub duration_ns: i64,
}

/// One event: an operator, a scope, a kernel, a copy, or memory allocated outside of operators.
///
/// # Source
/// `torch.autograd.profiler_util.FunctionEvent`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionEvent {
    /// The event's ID in its trace; device events have the ID of the event that launched them.
    pub id: u64,
    /// The name by which events are averaged; `ProfilerStep*` for steps.
    pub name: Arc<str>,
    /// The name in the trace; `None` for memory, which the trace shows in another way.
    pub trace_name: Option<Arc<str>>,
    /// The operator's overload; empty unless the profiler recorded overload names.
    pub overload_name: Arc<str>,
    /// In nanoseconds since the profile began.
    pub start_ns: i64,
    /// In nanoseconds since the profile began.
    pub end_ns: i64,
    /// libtorch's ID of the thread.
    pub thread: u64,
    /// For a node of the backward pass: the thread of its forward operator.
    pub fwd_thread: u64,
    /// The inputs' shapes, if recorded; empty for inputs that are not tensors.
    pub input_shapes: Vec<Vec<i64>>,
    /// The inputs' types, if recorded: `float`, `c10::BFloat16`, `Scalar`, ..
    pub input_types: Vec<Arc<str>>,
    /// The kind of code.
    pub scope: RecordScope,
    /// Bytes of host memory allocated during the event, less those freed.
    pub cpu_memory_usage: i64,
    /// Bytes of device memory allocated during the event, less those freed.
    pub device_memory_usage: i64,
    /// Whether it is asynchronous, or ended on another thread than it began.
    pub is_async: bool,
    /// A number that a forward operator and its backward node share; -1 for other events.
    pub sequence_nr: i64,
    /// Where it took place.
    pub device_type: DeviceType,
    /// The GPU's index; for events on the host, the process ID.
    pub device_index: i32,
    /// The system's thread ID, or the number of the stream.
    pub device_resource_id: i64,
    /// Floating point operations, if libtorch computes them.
    pub flops: u64,
    /// Whether it is a scope of the user.
    pub is_user_annotation: bool,
    /// What it has launched on a device.
    pub kernels: Vec<Kernel>,
    /// The events directly within it on the same thread, by their index in the list.
    pub cpu_children: Vec<usize>,
    /// The event directly around it on the same thread, by its index in the list.
    pub cpu_parent: Option<usize>,
}

impl FunctionEvent {
    /// An event on the host; all other fields are empty.
    pub fn new(name: &str, thread: u64, start_ns: i64, end_ns: i64) -> Self {
        let name: Arc<str> = name.into();
        Self {
            id: 0,
            trace_name: Some(name.clone()),
            name: averaged_name(&name),
            overload_name: "".into(),
            start_ns,
            end_ns,
            thread,
            fwd_thread: 0,
            input_shapes: Vec::new(),
            input_types: Vec::new(),
            scope: RecordScope::Function,
            cpu_memory_usage: 0,
            device_memory_usage: 0,
            is_async: false,
            sequence_nr: -1,
            device_type: DeviceType::Cpu,
            device_index: 0,
            device_resource_id: 0,
            flops: 0,
            is_user_annotation: false,
            kernels: Vec::new(),
            cpu_children: Vec::new(),
            cpu_parent: None,
        }
    }

    /// From its start to its end, in nanoseconds.
    pub fn elapsed_ns(&self) -> i64 {
        self.end_ns - self.start_ns
    }

    /// Time on the host, in nanoseconds; 0 for events of a device.
    pub fn cpu_time_total_ns(&self) -> i64 {
        if self.device_type == DeviceType::Cpu { self.elapsed_ns() } else { 0 }
    }

    /// Whether it can have children and a parent: only synchronous events on the host can.
    pub(crate) fn nests(&self) -> bool {
        !self.is_async && self.device_type == DeviceType::Cpu
    }
}

/// All steps share one name, so that they are averaged together.
pub(super) fn averaged_name(name: &Arc<str>) -> Arc<str> {
    if name.starts_with("ProfilerStep#") { "ProfilerStep*".into() } else { name.clone() }
}
