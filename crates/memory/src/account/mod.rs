//! What memory is used for, and how much a step will need.

mod estimate;
mod forecast;
mod leaks;
mod record;
mod snapshot;
mod stats;

pub use estimate::Estimate;
pub use leaks::{Leak, LeakCheck, leak_check};
pub use overdrive_core::{MemoryForecast, MemoryTechnique, MemoryUse};
pub use overdrive_ffi::allocations::Category;
pub use overdrive_ffi::cuda::{empty_cache, memory_snapshot, record_memory_history, set_allocator_settings};
pub use record::{MemoryRecord, MemoryRecorder, Use};
pub use stats::{MemoryStats, memory_stats, reset_peak_memory_stats, set_per_process_memory_fraction};
