//! Monitors the machine while a program trains.

mod builder;
mod counters;
mod file;
mod gap;
mod gpu;
mod http;
mod machine;
mod nvml;
mod prometheus;
mod sample;
mod sampler;
mod usage;

pub use builder::MonitorBuilder;
pub use counters::{Counters, Rates};
pub use gap::{GapSource, MonitorGap};
pub use gpu::{GpuProcess, GpuSample, GpuSource, ThrottleReason};
pub use machine::Monitor;
pub use nvml::Nvml;
pub use prometheus::prometheus_text;
pub use sample::{CacheSample, ProcessSample, Sample, SystemSample, ThreadSample};
pub use sampler::Sampler;
pub(crate) use usage::queued_seconds_of_this_thread;
