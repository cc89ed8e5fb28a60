//! What can go wrong.

use std::path::PathBuf;

use overdrive_core::{OptimizerError, StateError, SyncError, TorchError};
use overdrive_ddp::DdpError;

/// Why something of this crate was refused or failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShardError {
    /// The sizes of a mesh do not multiply to the number of ranks.
    #[error(
        "a mesh of {dimensions} needs {needed} ranks, but the group has {ranks}: the sizes should multiply to {ranks}"
    )]
    MeshSizes {
        /// The dimensions as given, such as `replicate=2 x shard=2`.
        dimensions: String,
        /// The product of their sizes.
        needed: String,
        /// How many ranks the group has.
        ranks: usize,
    },
    /// The name of a mesh's dimension is empty or given twice, or there are no dimensions.
    #[error("the dimensions {dimensions} cannot be a mesh: {reason}")]
    MeshNames {
        /// The dimensions as given.
        dimensions: String,
        /// What is wrong with them, and what would be right.
        reason: String,
    },
    /// A dimension that the mesh does not have.
    #[error("the mesh has no dimension {name:?}: it has {names:?}")]
    NoSuchDimension {
        /// The name asked for.
        name: String,
        /// The names that there are.
        names: Vec<String>,
    },
    /// Ranks were given different things where all should be given the same. Every rank gets this error.
    #[error(
        "the ranks disagree: {what} is {found} on rank {rank}, but {expected} on rank 0; it should be the same on all"
    )]
    RanksDisagree {
        /// What differs.
        what: String,
        /// The first rank of the group that differs from rank 0.
        rank: usize,
        /// What that rank has.
        found: String,
        /// What rank 0 has.
        expected: String,
    },
    /// A unit of a fully sharded model cannot be made, or is not there.
    #[error("the unit `{name}`: {reason}")]
    Unit {
        /// Its name.
        name: String,
        /// What is wrong with it, and what would be right.
        reason: String,
    },
    /// The folder for offloaded rows cannot be used.
    #[error("{} for offloaded parameters: {source}; it should be a folder that exists", path.display())]
    Disk {
        /// The folder.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// A figure of a plan that cannot be.
    #[error("{name} is {found}, but should be {expected}")]
    Figure {
        /// Which one.
        name: &'static str,
        /// What was given.
        found: f64,
        /// What would be right.
        expected: &'static str,
    },
    /// Another rank was refused or failed, so that this one did not go on alone.
    #[error("{what} was given up on all ranks, because rank {rank} reports: {reason}")]
    OtherRank {
        /// What all ranks wanted to do together.
        what: &'static str,
        /// The first rank of the group with an error.
        rank: usize,
        /// That rank's error.
        reason: String,
    },
    /// An optimizer refused or failed.
    #[error(transparent)]
    Optimizer(#[from] OptimizerError),
    /// A state cannot be saved or loaded.
    #[error(transparent)]
    State(#[from] StateError),
    /// Communication between ranks failed.
    #[error(transparent)]
    Ddp(#[from] DdpError),
    /// libtorch failed.
    #[error(transparent)]
    Torch(#[from] TorchError),
}

impl From<tch::TchError> for ShardError {
    fn from(error: tch::TchError) -> Self {
        Self::Torch(error.into())
    }
}

impl From<ShardError> for OptimizerError {
    fn from(error: ShardError) -> Self {
        match error {
            ShardError::Optimizer(own) => own,
            ShardError::Torch(own) => Self::Torch(own),
            other => Self::Sync(SyncError(Box::new(other))),
        }
    }
}

impl From<ShardError> for SyncError {
    fn from(error: ShardError) -> Self {
        let boxed: Box<dyn std::error::Error + Send + Sync> = Box::new(error);
        Self(boxed)
    }
}
