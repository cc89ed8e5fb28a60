//! The record of a whole run, for a diagnosis, a page, and comparisons.

mod claim;
mod machine;
mod ops;
mod profile;
mod ranks;
mod recorder;
mod stepped;
mod track;
mod window;

pub(crate) use claim::{Claim, NO_STEP_TIMER};
pub use machine::MachineInfo;
pub use ops::{HostGap, OpTimes, PhaseTimes, ProfiledSteps, ScopeTimes};
pub use profile::{RunProfile, StepTimes};
pub use ranks::RankInfo;
pub(crate) use recorder::Recorder;
pub use recorder::RunRecorder;
pub(crate) use stepped::{NextStep, release_profiler};
pub(crate) use window::SKIPPED;
