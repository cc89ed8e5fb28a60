//! What goes wrong between ranks.

use std::sync::Arc;
use std::time::Duration;

use overdrive_core::{SyncError, TorchError, TorchErrorKind};

/// Which collective a rank was in, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Context {
    /// The collective, by its name here.
    pub op: &'static str,
    /// This process's rank in the group.
    pub rank: usize,
    /// How many ranks the group has.
    pub size: usize,
    /// The group's name: "0" for the first.
    pub group: Arc<str>,
}

impl std::fmt::Display for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} on rank {} of {} in group {:?}", self.op, self.rank, self.size, &*self.group)
    }
}

/// Why distributed training refused or failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DdpError {
    /// Nothing says which rank this is.
    #[error(
        "no launcher is to be seen: neither RANK (torchrun, overdrive-run), SLURM_PROCID nor OMPI_COMM_WORLD_RANK is set"
    )]
    NoLauncher,
    /// A variable of the environment that is needed and not set.
    #[error("the variable {variable} is not set, but should be {expected} ({launcher})")]
    MissingVariable {
        /// Its name.
        variable: &'static str,
        /// What would be right.
        expected: &'static str,
        /// Who sets it.
        launcher: &'static str,
    },
    /// A variable of the environment that makes no sense.
    #[error("the variable {variable} is {found:?}, but should be {expected}")]
    InvalidVariable {
        /// Its name.
        variable: &'static str,
        /// What it holds.
        found: String,
        /// What would be right.
        expected: String,
    },
    /// An address to meet at that makes no sense.
    #[error("the address {address:?} {reason}; it should be like {expected}")]
    InvalidAddress {
        /// What was given.
        address: String,
        /// What is wrong with it.
        reason: String,
        /// What would be right.
        expected: &'static str,
    },
    /// A rank that the group does not have.
    #[error("{what} is rank {rank}, but should be below the group's size of {size}")]
    InvalidRank {
        /// Whose rank it is.
        what: &'static str,
        /// What was given.
        rank: usize,
        /// How many ranks there are.
        size: usize,
    },
    /// Members of a new group that make no sense.
    #[error("the ranks {ranks:?} cannot be a group: {reason}")]
    InvalidMembers {
        /// What was given.
        ranks: Vec<usize>,
        /// What is wrong with them.
        reason: String,
    },
    /// An option outside its range.
    #[error("{option} is {found}, but should be {expected}")]
    InvalidOption {
        /// The option's name.
        option: &'static str,
        /// What was given.
        found: String,
        /// What would be right.
        expected: &'static str,
    },
    /// A tensor that a collective cannot take.
    #[error("{op}: {argument} is {found}, but should be {expected}")]
    InvalidTensor {
        /// The collective.
        op: &'static str,
        /// Which tensor it is.
        argument: String,
        /// What it is.
        found: String,
        /// What would be right.
        expected: String,
    },
    /// Something that the group's backend does not do.
    #[error("{op}: {reason}")]
    Unsupported {
        /// The collective.
        op: &'static str,
        /// What the backend cannot do, and what can.
        reason: String,
    },
    /// Two wrappings of one parameter, whose optimizer steps in the backward pass, behind one of them.
    #[error(
        "the parameter {name:?} is stepped in the backward pass, and another `DistributedDataParallel` averages its gradient: \
         drop that one first"
    )]
    WrappedTwice {
        /// Its name.
        name: String,
    },
    /// A parameter that was frozen when the model was wrapped, and is no longer.
    #[error(
        "the parameter {name:?} was frozen when `DistributedDataParallel` was made, so that its gradient would stay each \
         rank's own: make it anew behind unfreezing"
    )]
    Unfrozen {
        /// Its name.
        name: String,
    },
    /// A backward pass that was to average, of a model that was not called through `forward`.
    #[error(
        "the model was not called through `ddp.forward`, so that this backward pass would leave each rank its own \
         gradients: call it there"
    )]
    NoForward,
    /// The ranks did not find each other.
    #[error(
        "rank {rank} of {size} could not meet the others at {place} within {timeout:?}: are all {size} ranks started, \
         is WORLD_SIZE right on each, and is the port free and open? {source}"
    )]
    Rendezvous {
        /// This process's rank.
        rank: usize,
        /// How many ranks there should be.
        size: usize,
        /// Where they were to meet.
        place: String,
        /// How long it was waited.
        timeout: Duration,
        /// libtorch's reason.
        source: TorchError,
    },
    /// A collective was still waiting for another rank when its time was up. The group is of no use any more.
    #[error("{context}: another rank did not come in time: {source}")]
    TimedOut {
        /// What was waiting.
        context: Box<Context>,
        /// libtorch's reason.
        source: TorchError,
    },
    /// A rank is gone, or ranks ran different collectives. The group is of no use any more.
    #[error("{context}: the connection to another rank failed: {source}")]
    Lost {
        /// What was under way.
        context: Box<Context>,
        /// libtorch's reason.
        source: TorchError,
    },
    /// Ranks ran different collectives, or one with different shapes or dtypes; only groups that verify tell it so.
    #[error("{context}: the ranks disagree: {source}")]
    Mismatch {
        /// What was to run here.
        context: Box<Context>,
        /// What each rank was to run.
        source: TorchError,
    },
    /// Ranks that a monitored barrier has waited for in vain; only rank 0 knows them.
    #[error("{context}: the ranks {ranks:?} did not come in time")]
    MissingRanks {
        /// The barrier.
        context: Box<Context>,
        /// Who is missing.
        ranks: Vec<usize>,
        /// libtorch's words.
        source: TorchError,
    },
    /// Models that are not the same on all ranks.
    #[error("the models differ: {what} is {found} on rank {rank}, but {expected} on rank 0")]
    ModelMismatch {
        /// The first parameter or buffer that differs, or "the number of parameters".
        what: String,
        /// The rank that differs.
        rank: usize,
        /// What it has.
        found: String,
        /// What rank 0 has.
        expected: String,
    },
    /// A model without parameters that require gradients.
    #[error("no parameter requires a gradient, but data-parallel training averages gradients")]
    NoParameters,
    /// A parameter that cannot be trained this way.
    #[error("the parameter {name:?} {reason}")]
    InvalidParameter {
        /// Its name.
        name: String,
        /// What is wrong with it, and what would be right.
        reason: String,
    },
    /// A buffer that cannot be sent to the other ranks.
    #[error("the buffer {name:?} {reason}")]
    InvalidBuffer {
        /// Its name.
        name: String,
        /// What is wrong with it, and what would be right.
        reason: String,
    },
    /// A gradient that is no plain numbers, an embedding's with `sparse: true`. Build the `DistributedDataParallel` anew to go
    /// on.
    #[error(
        "the gradient of the parameter {name:?} is sparse, but only dense ones are averaged: make the embedding with \
         `sparse: false`"
    )]
    SparseGradient {
        /// The parameter's name.
        name: String,
    },
    /// A communication hook returned an error. Build the `DistributedDataParallel` anew to go on.
    #[error("the communication hook failed: {0}")]
    Hook(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A communication hook has failed in an earlier pass, in whose middle the reducer stands.
    #[error(
        "the communication hook has failed before, and left a backward pass half done: build the DistributedDataParallel \
         anew to go on; its first failure was: {first}"
    )]
    HookHasFailed {
        /// What its first failure said.
        first: String,
    },
    /// A hook was set although there is one.
    #[error("a communication hook is set already, and stays for the life of its DistributedDataParallel")]
    HookTaken,
    /// Holding gradients back where that cannot be done.
    #[error("{0}")]
    CannotHoldBack(&'static str),
    /// A call in the middle of a backward pass, by a hook, or by another thread while the communication hook runs.
    #[error("{call} was called while a backward pass is under way, but should be called before or behind it")]
    WithinBackward {
        /// What was called.
        call: &'static str,
    },
    /// An object that cannot be sent, or is not what was expected.
    #[error("{op}: the object of rank {rank} cannot be {direction}: {source}")]
    Object {
        /// The collective.
        op: &'static str,
        /// Whose object it is.
        rank: usize,
        /// "sent" or "read".
        direction: &'static str,
        /// serde's reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// libtorch failed.
    #[error(transparent)]
    Torch(#[from] TorchError),
}

impl DdpError {
    /// What a failed collective of libtorch means.
    pub(crate) fn between(context: Context, source: TorchError) -> Self {
        let context = Box::new(context);
        let text = source.message();
        if text.contains("Detected mismatch between collectives") || text.contains("same shapes and dtypes") {
            return Self::Mismatch { context, source };
        }
        // What a group that verifies says, as an error of no kind, when a rank goes while the others compare.
        if text.contains("received errors while waiting for send/recv") {
            return Self::Lost { context, source };
        }
        match source.kind() {
            TorchErrorKind::Timeout => Self::TimedOut { context, source },
            TorchErrorKind::Distributed => Self::Lost { context, source },
            _ => Self::Torch(source),
        }
    }
}

impl From<tch::TchError> for DdpError {
    fn from(error: tch::TchError) -> Self {
        Self::Torch(error.into())
    }
}

impl From<DdpError> for SyncError {
    fn from(error: DdpError) -> Self {
        let boxed: Box<dyn std::error::Error + Send + Sync> = Box::new(error);
        Self(boxed)
    }
}
