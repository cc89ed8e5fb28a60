//! A profile in files: Chrome traces, and memory over time.

mod file;
mod memory;
mod place;
mod tail;
mod tensorboard;
mod threads;
mod writer;

pub(crate) use file::{TraceFile, replace};
pub use memory::MemoryTimeline;
pub(crate) use memory::{export, timelines};
pub use tensorboard::{TensorBoardHandler, tensorboard_trace_handler};
pub(crate) use threads::ThreadNames;
pub use writer::TraceWriter;
