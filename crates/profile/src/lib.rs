//! Finds what a training run waits for.
//!
//! [`Profiler`] is libtorch's own profiler with PyTorch's schedule, tables and traces.
#![forbid(unsafe_code)]

mod error;
mod events;
mod profile;
mod profiler;
#[cfg(feature = "tracing")]
mod span_layer;
mod trace;

pub use error::ProfileError;
pub use events::{
    Averages, DeviceType, EventList, FunctionEvent, FunctionEventAvg, Grouping, Kernel, RecordScope, Recording, SortBy,
    TableOptions, TimeUnit,
};
pub use overdrive_ffi::profiler::{ScopeGuard, record_function};
pub use profile::Profile;
pub use profiler::{Activity, Gap, Profiler, ProfilerAction, ProfilerBuilder, Schedule, TraceHandler};
#[cfg(feature = "tracing")]
pub use span_layer::SpanLayer;
pub use trace::{MemoryTimeline, TensorBoardHandler, TraceWriter, tensorboard_trace_handler};
