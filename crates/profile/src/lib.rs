//! Finds what a training run waits for.
//!
//! [`Profiler`] is libtorch's own profiler with PyTorch's schedule, tables and traces. [`StepTimer`] reports where the
//! time of each step goes, and is cheap enough to stay on. [`Monitor`] samples CPUs, memory, disks and GPUs meanwhile.
#![forbid(unsafe_code)]

mod compare;
mod diagnosis;
mod error;
mod events;
mod monitor;
mod page;
mod profile;
mod profiler;
mod run;
#[cfg(feature = "tracing")]
mod span_layer;
mod step_timer;
mod thread_tuner;
mod trace;

pub use compare::{ComparedBytes, ComparedOp, ComparedTime, Comparison, Verdict};
pub use diagnosis::{Bottleneck, Diagnosis, Finding};
pub use error::ProfileError;
pub use events::{
    Averages, DeviceType, EventList, FunctionEvent, FunctionEventAvg, Grouping, Kernel, RecordScope, Recording, SortBy,
    TableOptions, TimeUnit,
};
pub use monitor::{
    CacheSample, Counters, GapSource, GpuProcess, GpuSample, GpuSource, Monitor, MonitorBuilder, MonitorGap, Nvml,
    ProcessSample, Rates, Sample, Sampler, SystemSample, ThreadSample, ThrottleReason, prometheus_text,
};
pub use overdrive_ffi::profiler::{ScopeGuard, record_function};
pub use profile::Profile;
pub use profiler::{Activity, Gap, Profiler, ProfilerAction, ProfilerBuilder, Schedule, TraceHandler};
pub use run::{
    HostGap, MachineInfo, OpTimes, PhaseTimes, ProfiledSteps, RankInfo, RunProfile, RunRecorder, ScopeTimes, StepTimes,
};
#[cfg(feature = "tracing")]
pub use span_layer::SpanLayer;
pub use step_timer::{
    Batches, DeviceReport, Phase, PhaseGuard, PhaseReport, StepReport, StepTimer, StepTimerBuilder, Straggler,
    stragglers,
};
pub use thread_tuner::ThreadTuner;
pub use trace::{MemoryTimeline, TensorBoardHandler, TraceWriter, tensorboard_trace_handler};
