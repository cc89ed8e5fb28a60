//! The contracts that Overdrive's crates share.
//!
//! A crate that trains takes any [`Optimizer`], a crate that saves takes anything [`Stateful`], and gradient
//! accumulation holds back any [`GradientSync`]. `tch::nn::Optimizer` is an [`Optimizer`] too, so an existing tch
//! program can use every crate as it is.
#![forbid(unsafe_code)]

mod activity;
mod cache_fill;
mod gradient_sync;
mod optimizer;
mod ranks;
mod state;
mod tch_optimizer;
mod var_store;

pub use activity::{Activity, ActivityGuard, ActivityObserver, ActivityObserverEntry, activity};
pub use cache_fill::{CacheFill, FillingCache};
pub use gradient_sync::{GradientSync, SingleProcess, SyncError};
pub use optimizer::{GradScale, Optimizer, OptimizerError, OptimizerId};
pub use overdrive_ffi::{Error as TorchError, ErrorKind as TorchErrorKind};
pub use ranks::RankGroup;
pub use state::{Entry, StateDict, StateError, Stateful};
