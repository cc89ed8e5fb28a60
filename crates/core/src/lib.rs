//! The traits that Overdrive's crates share.
//!
//! A crate that trains takes any [`Optimizer`], a crate that saves takes anything [`Stateful`], and gradient
//! accumulation holds back any [`GradientSync`]. [`TchOptimizer`] makes an [`Optimizer`] of `tch::nn::Optimizer`, so an
//! existing tch program can use every crate.
#![forbid(unsafe_code)]

mod activity;
mod averages;
mod boxed;
mod cache_fill;
mod forward_error;
mod gradient_sync;
mod growth;
mod locked_file;
mod look_ahead;
mod marks;
mod memory_forecast;
mod module;
mod module_state;
mod optimizer;
mod parameter;
mod part;
mod pointers;
mod ranks;
mod recomputing;
mod rows;
#[cfg(feature = "safetensors")]
pub mod safetensors;
mod seed;
mod state;
mod tch_optimizer;
mod var_store;
mod walk;
mod weights;

pub use activity::{Activity, ActivityGuard, ActivityObserver, ActivityObserverEntry, activity};
pub use averages::Averages;
pub use cache_fill::{CacheFill, FillingCache};
pub use forward_error::ForwardError;
pub use gradient_sync::{AveragedBy, GradientSync, PendingSum, SingleProcess, SyncError};
pub use growth::Growth;
pub use locked_file::LockedFile;
pub use look_ahead::{HeldBatches, is_taken_ahead, take_ahead, when_handed_out};
pub use marks::{
    AVERAGED, IGNORED, IS_SHARDED, MOVED, Marked, Marks, NOT_AVERAGED, SHARDED, SHARDED_GRADIENTS, STEPPED_IN_BACKWARD,
    UNSCALED, check_averaged, check_not_stepped_in_backward,
};
pub use memory_forecast::{MemoryForecast, MemoryTechnique, MemoryUse};
pub use module::{Module, ModuleId, ModuleState, To, Visitor};
pub use module_state::{layer_states, load_module_state, module_entries, module_state};
pub use optimizer::{Behavior, GradScale, Optimizer, OptimizerError, OptimizerId};
pub use overdrive_ffi::{Error as TorchError, ErrorKind as TorchErrorKind};
pub use parameter::{IntoParameters, Parameter, prefixed};
pub use part::{Part, Setting};
pub use ranks::{RankGroup, SkipAgreement};
pub use recomputing::{Recomputing, is_recomputing};
pub use rows::{Rows, Shard, ShardedBy};
pub use seed::{base_seed, seed_everything};
pub use state::{Entry, RowsToLoad, Shapes, StateDict, StateError, Stateful};
pub use tch_optimizer::TchOptimizer;
pub use weights::{OtherRanks, Sharding, Weights};
