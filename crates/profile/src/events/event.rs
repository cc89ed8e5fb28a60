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

/// What kind of code an event on the host stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RecordScope {
    /// An operator.
    Function,
    /// A step of the backward pass.
    BackwardFunction,
    /// A scope of the user's own.
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

/// One event: an operator, a scope, a kernel, a copy, memory taken outside of any of them.
///
/// # Source
/// `torch.autograd.profiler_util.FunctionEvent`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionEvent {
    /// The event's number in its trace; device events have that of what launched them.
    pub id: u64,
    /// The name by which events are averaged: of steps `ProfilerStep*`.
    pub name: Arc<str>,
    /// The name in the trace; `None` for what the trace shows in another way.
    pub trace_name: Option<Arc<str>>,
    /// The operator's overload; empty unless the profiler was told to tell it.
    pub overload_name: Arc<str>,
    /// In nanoseconds since the profile began.
    pub start_ns: i64,
    /// In nanoseconds since the profile began.
    pub end_ns: i64,
    /// libtorch's number of the thread.
    pub thread: u64,
    /// Of a step of the backward pass: the thread of its forward operator.
    pub fwd_thread: u64,
    /// The inputs' shapes, if recorded; empty for whatever is no tensor.
    pub input_shapes: Vec<Vec<i64>>,
    /// The inputs' types, if recorded: `float`, `c10::BFloat16`, `Scalar`, ..
    pub input_types: Vec<Arc<str>>,
    /// What kind of code it is.
    pub scope: RecordScope,
    /// Bytes of host memory taken during the event, less those given back.
    pub cpu_memory_usage: i64,
    /// Bytes of device memory taken during the event, less those given back.
    pub device_memory_usage: i64,
    /// Whether it began in one thread and ended in another.
    pub is_async: bool,
    /// What a forward operator and its backward step have in common; -1 for others.
    pub sequence_nr: i64,
    /// Where it took place.
    pub device_type: DeviceType,
    /// The GPU; of events on the host: the process.
    pub device_index: i32,
    /// The system's number of the thread, or the number of the stream.
    pub device_resource_id: i64,
    /// Floating point operations, where libtorch can tell.
    pub flops: u64,
    /// Whether it is a scope of the user's own.
    pub is_user_annotation: bool,
    /// What it has launched on a device.
    pub kernels: Vec<Kernel>,
    /// The events directly within it on the same thread, by their place in the list.
    pub cpu_children: Vec<usize>,
    /// The event directly around it on the same thread, by its place in the list.
    pub cpu_parent: Option<usize>,
}

impl FunctionEvent {
    /// An event on the host with nothing else known of it.
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

    /// From its beginning to its end.
    pub fn elapsed_ns(&self) -> i64 {
        self.end_ns - self.start_ns
    }

    /// Time on the host, in nanoseconds; 0 for events of a device.
    pub fn cpu_time_total_ns(&self) -> i64 {
        if self.device_type == DeviceType::Cpu { self.elapsed_ns() } else { 0 }
    }

    /// Whether it has children and a parent: those on the host that stay in their thread.
    pub(crate) fn nests(&self) -> bool {
        !self.is_async && self.device_type == DeviceType::Cpu
    }
}

/// Steps are averaged together.
pub(super) fn averaged_name(name: &Arc<str>) -> Arc<str> {
    if name.starts_with("ProfilerStep#") { "ProfilerStep*".into() } else { name.clone() }
}
