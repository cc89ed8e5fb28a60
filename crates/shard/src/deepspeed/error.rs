//! What can be wrong with a DeepSpeed configuration, and with what is made of it.

use std::path::PathBuf;

use overdrive_amp::AmpError;
use overdrive_core::OptimizerError;

use crate::error::ShardError;

/// Why a DeepSpeed configuration was refused, or what is made of it failed. Keys are named by their whole path, such as
/// `zero_optimization.stage`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeepSpeedError {
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// The text is not JSON, or a key is given twice. DeepSpeed also reads Hjson; comments and trailing commas are
    /// refused here.
    #[error("not a DeepSpeed configuration in JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// A key that DeepSpeed does not have.
    #[error("`{key}` is unknown: DeepSpeed has no such key{hint}")]
    UnknownKey {
        /// Its path.
        key: String,
        /// The most similar key, if there is one.
        hint: String,
    },
    /// A value of another type, or outside its range.
    #[error("`{key}` is {found}, but should be {expected}")]
    Value {
        /// The key's path.
        key: String,
        /// What it says.
        found: String,
        /// What would be right.
        expected: String,
    },
    /// A key without which another makes no sense.
    #[error("`{key}` is missing: {reason}")]
    Missing {
        /// The key's path.
        key: String,
        /// Why it is needed.
        reason: String,
    },
    /// Something that DeepSpeed has, and Overdrive has not or has elsewhere.
    #[error("`{key}`: {found} is refused: {reason}")]
    Refused {
        /// The key's path.
        key: String,
        /// What it says.
        found: String,
        /// Why, and what to use.
        reason: String,
    },
    /// Keys that cannot all be meant.
    #[error("{keys} contradict each other: {reason}")]
    Contradiction {
        /// Their paths.
        keys: String,
        /// Why.
        reason: String,
    },
    /// `"auto"`, where the argument that it stands for was not given.
    #[error("`{key}` is \"auto\", but the arguments have no `{argument}`: give it, or write a value into the file")]
    Auto {
        /// The key's path.
        key: String,
        /// The setter of [`TrainingArguments`](super::TrainingArguments).
        argument: &'static str,
    },
    /// The file and the arguments say different things.
    #[error("{mismatches}: write \"auto\" into the file, or give the same")]
    Mismatch {
        /// Each key with both values.
        mismatches: String,
    },
    /// Batch sizes that do not multiply.
    #[error("batch sizes do not fit: {0}")]
    BatchSizes(String),
    /// The configuration was read for another number of ranks.
    #[error(
        "the configuration was read for {expected} ranks, but the group has {found}: give its size to `TrainingArguments`"
    )]
    WorldSize {
        /// The number given.
        expected: usize,
        /// The group's.
        found: usize,
    },
    /// A part of another ZeRO stage than the file's.
    #[error("{part} is of ZeRO stage {stages}, but `zero_optimization.stage` is {found}")]
    Stage {
        /// What was asked for.
        part: &'static str,
        /// The stages that have it.
        stages: &'static str,
        /// The file's.
        found: u64,
    },
    /// An overflow at the smallest loss scale.
    #[error(
        "gradients overflow at the smallest loss scale of {min_loss_scale} (`fp16.min_loss_scale`), which cannot shrink: use bf16, or a smaller learning rate"
    )]
    LossScale {
        /// The smallest scale.
        min_loss_scale: f64,
    },
    /// Mixed precision failed.
    #[error(transparent)]
    Amp(#[from] AmpError),
    /// An optimizer refused or failed.
    #[error(transparent)]
    Optimizer(#[from] OptimizerError),
    /// Sharding refused or failed.
    #[error(transparent)]
    Shard(#[from] ShardError),
}
