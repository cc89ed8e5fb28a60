//! What can go wrong.

use overdrive_core::ForwardError;
use overdrive_ffi::Error as TorchError;
use overdrive_ffi::autograd::BoxError;
use tch::Device;

use crate::account::Leak;

/// Why something of this crate failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The function that was checkpointed failed.
    #[error("{scope}: {source}")]
    Function {
        /// Its name, or the line that called `checkpoint`.
        scope: String,
        /// What it failed with.
        source: BoxError,
    },
    /// It saved other tensors when it ran again, so its gradients would be wrong.
    #[error("{scope}: {difference}; run again, the function has to compute the same as the first time")]
    Changed {
        /// Its name, or the line that called `checkpoint`.
        scope: String,
        /// What was different.
        difference: String,
    },
    /// A backward pass within the function needs the function again on another thread, such as one of a GPU's.
    #[error(
        "{scope}: a backward pass within the function cannot run it again on another thread: use the CPU, or checkpoint a part without a backward pass"
    )]
    OtherThread {
        /// Its name, or the line that called `checkpoint`.
        scope: String,
    },
    /// Layers cannot be parted like this.
    #[error(
        "{layers} layers cannot be parted into {segments} segments: use at least one layer, and 1 to {layers} segments"
    )]
    Segments {
        /// What was asked for.
        segments: usize,
        /// How many layers there are.
        layers: usize,
    },
    /// A single sample does not fit into memory.
    #[error("a single sample does not fit into memory: {source}")]
    TooLarge {
        /// What libtorch says.
        source: BoxError,
    },
    /// Tensors that are no batch.
    #[error("the tensors of a batch have first dimensions {sizes:?}, but should have the same one, of at least 1")]
    Batch {
        /// Their first dimensions.
        sizes: Vec<i64>,
    },
    /// A weight that is not a number of samples or tokens.
    #[error(
        "the weight of a batch is {found}, but should be the number of samples or tokens that its mean loss averages over: at least \
         0, and above 0 for the batches of all ranks together"
    )]
    Weight {
        /// What was given.
        found: i64,
    },
    /// Weights that do not add up.
    #[error(
        "a batch weighs {batch}, but its parts {parts}: a weight should count something of each sample, such as its tokens"
    )]
    Weights {
        /// The whole batch's.
        batch: i64,
        /// Those of its parts together.
        parts: i64,
    },
    /// This rank's part was computed, but another rank's was not.
    #[error("another rank has failed; its own error says why")]
    OtherRank,
    /// A budget that is not from 0 to 1.
    #[error("a budget of {share} is not from 0 (keep nothing) to 1 (as much as without checkpointing)")]
    Budget {
        /// What was given.
        share: f64,
    },
    /// Sizes that cannot be compared.
    #[error(
        "sizes of {sizes:?} cannot be compared: the first should be at least 1, and each larger than the one before"
    )]
    Sizes {
        /// What was given.
        sizes: [i64; 4],
    },
    /// Nothing was allocated where memory was to be estimated.
    #[error("nothing was allocated on {device:?}: name the device that the step runs on")]
    NothingThere {
        /// What was given.
        device: Device,
    },
    /// A step left memory behind.
    #[error("a step left memory behind: {}", leaks.iter().map(Leak::to_string).collect::<Vec<_>>().join("; "))]
    Leaked {
        /// By the line that had it allocated, the largest first.
        leaks: Vec<Leak>,
    },
    /// A device whose memory is not known.
    #[error("the memory of {device:?} is not known here: use a CUDA device{}", match device {
        Device::Cpu => ", and `host_memory::count(limit)` for the host",
        _ => " or the host",
    })]
    Device {
        /// What was given.
        device: Device,
    },
    /// A state could not be read.
    #[error(transparent)]
    State(#[from] overdrive_core::StateError),
    /// A saved tensor or a snapshot could not be written or read.
    #[error("{}: {source}", path.display())]
    Disk {
        /// The folder or file.
        path: std::path::PathBuf,
        /// What the system says.
        source: std::sync::Arc<std::io::Error>,
    },
    /// A saved tensor was changed in place before it was on the host.
    #[error(
        "a saved tensor of shape {shape:?} was changed in place before its copy to the host had ended: change a copy of it, or turn \
         the hooks off for the operator that saves it"
    )]
    ChangedInPlace {
        /// Its shape.
        shape: Vec<i64>,
    },
    /// The optimizer failed.
    #[error(transparent)]
    Optimizer(#[from] overdrive_core::OptimizerError),
    /// Communication between ranks failed.
    #[error(transparent)]
    Sync(#[from] overdrive_core::SyncError),
    /// libtorch failed.
    #[error(transparent)]
    Torch(#[from] TorchError),
}

/// So that `?` works in a module's forward pass.
impl ForwardError for MemoryError {
    fn into_torch(self) -> Result<TorchError, Self> {
        if let Self::Torch(error) = self { Ok(error) } else { Err(self) }
    }
}

/// So that `?` works in a function that calls both tch and `checkpoint`.
impl From<tch::TchError> for MemoryError {
    fn from(error: tch::TchError) -> Self {
        Self::Torch(error.into())
    }
}
