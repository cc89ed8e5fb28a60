//! The profiler: what starts and stops it, and when.

mod builder;
mod handler;
mod machine;
mod schedule;

pub use builder::{Activity, ProfilerBuilder};
pub use handler::TraceHandler;
pub use machine::{Gap, Profiler};
pub use schedule::{ProfilerAction, Schedule};
