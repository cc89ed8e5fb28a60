//! Errors of distributed training.

use std::sync::Arc;
use std::time::Duration;

use overdrive_core::{SyncError, TorchError, TorchErrorKind};
use tch::Device;

/// Which collective a rank was in, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Context {
    /// The collective's name in this crate, such as `all_reduce`.
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
    /// No launcher's variables are set.
    #[error(
        "no launcher detected: none of RANK (torchrun, overdrive-run), SLURM_PROCID and OMPI_COMM_WORLD_RANK is set"
    )]
    NoLauncher,
    /// A required environment variable is not set.
    #[error("the variable {variable} is not set, but should be {expected} ({launcher})")]
    MissingVariable {
        /// Its name.
        variable: &'static str,
        /// What would be right.
        expected: &'static str,
        /// The launcher that sets it.
        launcher: &'static str,
    },
    /// An environment variable is invalid.
    #[error("the variable {variable} is {found:?}, but should be {expected}")]
    InvalidVariable {
        /// Its name.
        variable: &'static str,
        /// What it holds.
        found: String,
        /// What would be right.
        expected: String,
    },
    /// A rendezvous address is invalid.
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
        /// What the rank is of, such as "the root".
        what: &'static str,
        /// What was given.
        rank: usize,
        /// How many ranks there are.
        size: usize,
    },
    /// Invalid members of a new group.
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
    /// A GPU that the process does not see.
    #[error(
        "{what} names GPU {device}, but the process sees {gpus}: start as many ranks on a host as it has GPUs, look at \
         CUDA_VISIBLE_DEVICES, or call `cuda_device`"
    )]
    NoSuchDevice {
        /// What names it.
        what: String,
        /// Its index.
        device: usize,
        /// How many there are.
        gpus: usize,
    },
    /// Two ranks on one GPU, which NCCL does not support.
    #[error(
        "rank {rank} is on GPU {device}, which is rank {other}'s: give each rank a GPU of its own, by LOCAL_RANK, \
         CUDA_VISIBLE_DEVICES or `cuda_device`"
    )]
    SharedDevice {
        /// Its index in this process.
        device: usize,
        /// This rank.
        rank: usize,
        /// The rank that has it.
        other: usize,
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
    /// A [check](crate::check_node) has found that this rank's device, or its connection to the others, is unfit.
    #[error("{device:?}: {reason}")]
    UnfitNode {
        /// The device that was checked.
        device: Device,
        /// What is wrong with it.
        reason: String,
    },
    /// Something that the group's backend does not support.
    #[error("{op}: {reason}")]
    Unsupported {
        /// The collective.
        op: &'static str,
        /// What the backend does not support, and what to use instead.
        reason: String,
    },
    /// A second wrapper of a parameter whose optimizer steps in the backward pass.
    #[error(
        "the parameter {name:?} is stepped in the backward pass, and another `DistributedDataParallel` averages its \
         gradient: drop the other `DistributedDataParallel` first"
    )]
    WrappedTwice {
        /// Its name.
        name: String,
    },
    /// A parameter that was frozen when the model was wrapped, and is not frozen now.
    #[error(
        "the parameter {name:?} was frozen when the `DistributedDataParallel` was made, so its gradient would not be \
         averaged: make the `DistributedDataParallel` anew after unfreezing"
    )]
    Unfrozen {
        /// Its name.
        name: String,
    },
    /// A backward pass that should average, of a model that was not called through `forward`.
    #[error(
        "the model was not called through `ddp.forward`, so this backward pass would not average the gradients: call \
         the model within `ddp.forward`"
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
        /// Where they should meet.
        place: String,
        /// How long this rank waited.
        timeout: Duration,
        /// libtorch's reason.
        source: TorchError,
    },
    /// A collective was still waiting for another rank at the timeout. The group is unusable afterwards.
    #[error("{context}: another rank did not arrive within the timeout: {source}")]
    TimedOut {
        /// The collective that was waiting.
        context: Box<Context>,
        /// libtorch's reason.
        source: TorchError,
    },
    /// A rank has exited, or ranks ran different collectives. The group is unusable afterwards.
    #[error("{context}: the connection to another rank failed: {source}")]
    Lost {
        /// The collective that was under way.
        context: Box<Context>,
        /// libtorch's reason.
        source: TorchError,
    },
    /// This process has closed or aborted the group.
    #[error("{context}: {source}")]
    Ended {
        /// What was asked of it.
        context: Box<Context>,
        /// How it ended.
        source: TorchError,
    },
    /// Ranks ran different collectives, or one with different shapes or dtypes. Only groups with
    /// [`verify`](crate::ProcessGroupBuilder::verify) report this.
    #[error("{context}: the ranks disagree: {source}")]
    Mismatch {
        /// What this rank wanted to run.
        context: Box<Context>,
        /// libtorch's description of what each rank wanted to run.
        source: TorchError,
    },
    /// Ranks that did not reach a monitored barrier in time. Only rank 0 knows them.
    #[error("{context}: the ranks {ranks:?} did not arrive within the timeout")]
    MissingRanks {
        /// The barrier.
        context: Box<Context>,
        /// The missing ranks.
        ranks: Vec<usize>,
        /// libtorch's reason.
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
    /// A sparse gradient, such as that of an embedding with `sparse: true`. Build the `DistributedDataParallel` anew to
    /// continue.
    #[error(
        "the gradient of the parameter {name:?} is sparse: name it in `sparse_gradients` (over Gloo), or make the embedding \
         with `sparse: false`"
    )]
    SparseGradient {
        /// The parameter's name.
        name: String,
    },
    /// A communication hook returned an error. Build the `DistributedDataParallel` anew to continue.
    #[error("the communication hook failed: {0}")]
    Hook(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A communication hook failed in an earlier pass, which the reducer cannot finish.
    #[error(
        "the communication hook has failed before, in a backward pass that cannot be finished: build the \
         DistributedDataParallel anew to continue; the hook's first failure was: {first}"
    )]
    HookHasFailed {
        /// The message of its first failure.
        first: String,
    },
    /// A second hook was registered.
    #[error("a communication hook is already registered: it stays as long as its DistributedDataParallel")]
    HookTaken,
    /// Accumulation asked to hold gradients back within `join`, or `join` was nested. The text says which.
    #[error("{0}")]
    CannotHoldBack(&'static str),
    /// A rank has no more inputs, in a loop of `join_with` that ends on all ranks then.
    #[error("rank {rank}: the loop ended because a rank has no more inputs, and throw_on_early_termination is set")]
    InputsExhausted {
        /// This rank.
        rank: usize,
    },
    /// A call in the middle of a backward pass, by a hook, or by another thread while the communication hook runs.
    #[error("{call} was called while a backward pass is under way, but should be called before or after it")]
    WithinBackward {
        /// The method that was called.
        call: &'static str,
    },
    /// An object that cannot be serialized, or is not of the expected type.
    #[error("{op}: the object of rank {rank} cannot be {direction}: {source}")]
    Object {
        /// The collective.
        op: &'static str,
        /// The rank that sent the object.
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

/// What libtorch says when a rank is lost at a monitored barrier: to a rank that waits for rank 0, and otherwise.
const LOST_AT_BARRIER: [&str; 2] =
    ["received errors while waiting for send/recv", "Monitored Barrier encountered error running collective"];

/// What libtorch says when a member dies while a group connects. The error has no kind.
const LOST_WHILE_CONNECTING: &str = "Gloo connectFullMesh failed";

impl DdpError {
    /// Translates libtorch's error of a failed collective, or of a group that could not be made.
    pub(crate) fn between(context: Context, source: TorchError) -> Self {
        let context = Box::new(context);
        let text = source.message();
        if text.contains("Detected mismatch between collectives") || text.contains("same shapes and dtypes") {
            return Self::Mismatch { context, source };
        }
        // A group that compares collectives over ranks has a monitored barrier before each, whose errors have no kind.
        match source.kind() {
            _ if text.contains("the group was closed") || text.contains("the group was aborted") => {
                Self::Ended { context, source }
            }
            _ if text.contains("failed to pass monitoredBarrier") => Self::TimedOut { context, source },
            _ if LOST_AT_BARRIER.iter().any(|lost| text.contains(lost)) => Self::Lost { context, source },
            TorchErrorKind::Timeout => Self::TimedOut { context, source },
            TorchErrorKind::Distributed => Self::Lost { context, source },
            _ if text.contains(LOST_WHILE_CONNECTING) => Self::Lost { context, source },
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_that_dies_while_a_group_connects_is_lost() {
        let context = Context { op: "new_group", rank: 0, size: 2, group: "1".into() };
        let text = "Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:547] Connection closed by peer \
                    [127.0.0.1]:40169";
        let lost = DdpError::between(context, tch::TchError::Torch(text.to_owned()).into());
        assert!(matches!(lost, DdpError::Lost { .. }), "{lost:?}");
    }

    #[test]
    fn a_groups_own_barrier_tells_a_lost_rank_from_a_late_one() {
        let failed = |text: &str| {
            let context = Context { op: "backward", rank: 1, size: 3, group: "0".into() };
            let barrier =
                "ProcessGroupWrapper: Monitored Barrier encountered error running collective: ALLREDUCE. Error: ";
            DdpError::between(context, tch::TchError::Torch(format!("{barrier}\n{text}")).into())
        };
        let lost = failed("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:15589");
        assert!(matches!(lost, DdpError::Lost { .. }), "{lost:?}");
        let lost =
            failed("Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv");
        assert!(matches!(lost, DdpError::Lost { .. }), "{lost:?}");
        let late = failed("[Rank 0]: Rank 2 failed to pass monitoredBarrier in 4000 ms");
        assert!(matches!(late, DdpError::TimedOut { .. }), "{late:?}");
    }
}
