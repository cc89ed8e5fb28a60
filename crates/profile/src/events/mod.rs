//! The events of a profile: how they nest, their sums by name, PyTorch's table.

mod averages;
mod event;
mod format;
mod list;
mod parse;
mod sort_by;
mod table;
mod tree;

pub use averages::{Averages, FunctionEventAvg, Grouping};
pub use event::{DeviceType, FunctionEvent, Kernel, RecordScope};
pub use format::TimeUnit;
pub use list::{EventList, Recording};
pub(crate) use parse::{memory_changes, parse};
pub use sort_by::SortBy;
pub use table::TableOptions;
