//! Times the phases of each step.

mod batches;
mod builder;
mod device;
mod phase;
mod report;
mod statistics;
mod stragglers;
mod timeline;
mod timer;
#[cfg(feature = "record")]
mod unmarked;

pub use batches::Batches;
pub use builder::StepTimerBuilder;
pub use phase::Phase;
pub use report::{DeviceReport, PhaseReport, StepReport};
pub use stragglers::{Straggler, stragglers};
pub use timer::{PhaseGuard, StepTimer};
