//! Learning rate schedules: PyTorch's, with its values, and a few more; early stopping, curricula, growing image and
//! batch sizes.
//!
//! A schedule is a plain value. A [`Scheduler`] runs it over plain rates; an `LrScheduler` over an optimizer's
//! groups. Their only state is the step and the base rates. Without the default feature `torch` the crate is plain
//! `f64` and needs no libtorch.
//!
//! ```
//! use overdrive_sched::{CosineAnnealingLr, LinearLr, Scheduler, SequentialLr};
//!
//! let warm_up = LinearLr::new().start_factor(0.1).total_iters(10);
//! let schedule = SequentialLr::new(warm_up).then(10, CosineAnnealingLr::new(90).eta_min(1e-5));
//! let mut sched = Scheduler::new(&[1e-3], schedule)?;
//! for epoch in 0..100 {
//!     // .. train an epoch at sched.last_lr()
//!     sched.step()?;
//! }
//! # Ok::<(), overdrive_sched::ScheduleError>(())
//! ```
#![forbid(unsafe_code)]

#[cfg(feature = "torch")]
mod attached;
#[cfg(feature = "torch")]
mod claim;
mod curriculum;
mod early_stopping;
mod error;
mod growth;
#[cfg(feature = "torch")]
mod lr_finder;
#[cfg(feature = "torch")]
mod lr_found;
mod metric;
mod node;
mod plan;
mod plateau;
#[cfg(feature = "torch")]
mod plateau_attached;
mod plot;
mod schedule;
mod scheduler;
mod schedules;

#[cfg(feature = "torch")]
pub use attached::LrScheduler;
pub use curriculum::Curriculum;
pub use early_stopping::{EarlyStopping, StoppingState, Verdict};
pub use error::ScheduleError;
pub use growth::{BatchSizeWarmup, ProgressiveResize};
#[cfg(feature = "torch")]
pub use lr_finder::{LrFinder, Sweep};
#[cfg(feature = "torch")]
pub use lr_found::LrSweep;
pub use metric::Mode;
pub use plan::{ChainedScheduler, Plan, SequentialLr};
pub use plateau::{PlateauState, ReduceLrOnPlateau, ReduceLrOnPlateauBuilder, ThresholdMode};
pub use plot::{plot, plot_values};
pub use schedule::{At, Group, PerGroup, Schedule};
pub use scheduler::{MAX_SEEK, Scheduler};
pub use schedules::cosine::{CosineAnnealingLr, CosineAnnealingWarmRestarts};
pub use schedules::cyclic::{CyclicLr, CyclicMode};
pub use schedules::decay::{ExponentialLr, MultiStepLr, StepLr};
pub use schedules::lambda::{FactorFn, LambdaLr, MultiplicativeLr};
pub use schedules::one_cycle::{AnnealStrategy, OneCycleLr};
pub use schedules::ramps::{ConstantLr, LinearLr, PolynomialLr};
pub use schedules::swa::SwaLr;
pub use schedules::warmup::{DecayShape, InverseSqrtLr, NoamLr, WarmupCosineLr, WarmupStableDecayLr, layer_wise_lrs};
