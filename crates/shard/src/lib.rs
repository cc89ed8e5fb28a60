//! Training state partitioned over ranks, so that a model whose training does not fit one rank's memory fits several.
//!
//! [`DeviceMesh`] names the dimensions of a process group: `"replicate"` and `"shard"`, say.
#![forbid(unsafe_code)]

mod agree;
mod error;
mod mesh;

pub use error::ShardError;
pub use mesh::DeviceMesh;

/// Runs the programs in the book.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/sharding.md")]
struct Book;
