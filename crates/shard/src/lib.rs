//! Training state partitioned over ranks, so that a model whose training does not fit one rank's memory fits several.
//!
//! [`ZeroRedundancyOptimizer`] keeps a part of any optimizer's state on each rank (ZeRO-1), and
//! [`ShardedDataParallel`] averages gradients so that each rank keeps those of its part alone (ZeRO-2).
//! [`FullyShardedDataParallel`] keeps some rows of each parameter on each rank (ZeRO-3, `fully_shard`). [`DeviceMesh`]
//! names the dimensions of a process group: `"replicate"` and `"shard"`, say. With the feature `deepspeed`, the module
//! `deepspeed` makes all of a run's objects of DeepSpeed's JSON, and `planner` works out which of all these fits and is
//! fastest.
#![forbid(unsafe_code)]

mod agree;
#[cfg(feature = "deepspeed")]
pub mod deepspeed;
mod error;
mod exchange;
mod full;
mod gradients;
mod link;
mod mesh;
mod ownership;
mod packing;
mod partition;
#[cfg(feature = "deepspeed")]
pub mod planner;
mod zero;

pub use error::ShardError;
pub use full::{
    Exchange, FullyShardedBuilder, FullyShardedDataParallel, FullyShardedOptimizer, HeldBack, OffloadPolicy,
    ShardedUnit,
};
pub use gradients::{GradNorm, NoSync, ShardedDataParallel};
pub use mesh::DeviceMesh;
pub use zero::ZeroRedundancyOptimizer;

/// Runs the programs in the book.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/sharding.md")]
struct Book;
