//! The errors of compiled steps.

use std::path::PathBuf;
use std::time::Duration;

use overdrive_core::{OptimizerError, TorchError};

/// Any error of a user's closure.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why a step was not compiled, or did not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CompileError {
    /// Something in the step cannot be compiled.
    #[error("{reason}{}: move it out of the step, or leave the step uncompiled", at(caller))]
    NotRecordable {
        /// What it is, with the operator.
        reason: String,
        /// The line that called the operator, where the program knows its lines.
        caller: Option<String>,
    },
    /// Two runs of the step differed in more than their tensors' values.
    #[error(
        "the step is not the same each time: {difference}{}. A number or branch that changes from step to step cannot be \
         compiled: make it a tensor and pass it in the batch",
        at(caller)
    )]
    Changes {
        /// What differed.
        difference: String,
        /// The line that called the operator, where the program knows its lines.
        caller: Option<String>,
    },
    /// The optimizer's update cannot be compiled.
    #[error(
        "this optimizer does not tell when its options are replaced, or its steps are not all the same \
         (`Optimizer::revision` is `None`), so its update cannot be compiled: compile the loss by itself \
         (`compile::loss`), or take AdamW, Adam or SGD of overdrive-optim"
    )]
    OtherOptimizer,
    /// A whole step of parameters whose gradients a `DistributedDataParallel` averages.
    #[error(
        "a `DistributedDataParallel` averages the gradients of the optimizer's parameters, and a whole step would use them \
         as they are: compile the loss by itself (`compile::loss`), run it within `ddp.forward(|| loss_of.run(&batch))`, \
         and call `ddp.backward`"
    )]
    Averaged,
    /// The reason of an earlier error: a step that was refused once stays so.
    #[error("{why}")]
    RefusedBefore {
        /// What that error said.
        why: String,
    },
    /// There is no Python to compile with.
    #[error(
        "no Python with torch {torch} was found ({tried}): set OVERDRIVE_PYTHON to one; or copy {} to a machine that has \
         one, run `overdrive-compile prepare` on it there, and copy it back",
        cache.display()
    )]
    NoPython {
        /// The version that is needed.
        torch: &'static str,
        /// What was tried.
        tried: String,
        /// The folder that has the record.
        cache: PathBuf,
    },
    /// There is no C++ compiler, which Inductor needs.
    #[error("the C++ compiler {compiler} was not found: install g++, or set CXX to one")]
    NoCompiler {
        /// What was tried.
        compiler: String,
    },
    /// The path of the cache is one that the C++ compiler would get in pieces.
    #[error(
        "the folder of compiled steps, {}, has {found:?} in its path, and Inductor hands its paths to the C++ compiler in \
         one line of words: name another folder in OVERDRIVE_COMPILE_CACHE",
        path.display()
    )]
    UnfitPath {
        /// The folder.
        path: PathBuf,
        /// The character.
        found: char,
    },
    /// Compiling took longer than [`Options::timeout`](crate::Options::timeout). A compiler that Python has started goes on
    /// until it ends by itself.
    #[error(
        "{python} was ended, since it has not compiled the step in {limit:?}: allow more time (`Options::timeout`)"
    )]
    Ended {
        /// The Python that compiled.
        python: PathBuf,
        /// How long was waited for it.
        limit: Duration,
    },
    /// Another process compiles for longer than [`Options::timeout`](crate::Options::timeout).
    #[error(
        "{who} has not compiled the step in {limit:?}: allow more time (`Options::timeout`), or end it if it is stuck"
    )]
    TimedOut {
        /// The process that compiles.
        who: String,
        /// How long was waited for it.
        limit: Duration,
    },
    /// Python could not compile the step.
    #[error("{python} could not compile the step ({status}); the end of what it said:\n{output}")]
    Failed {
        /// The interpreter.
        python: PathBuf,
        /// How it ended.
        status: String,
        /// The last lines of its standard error.
        output: String,
    },
    /// A file or folder of the cache could not be used.
    #[error("{what} {}: {error}", path.display())]
    Cache {
        /// What was tried.
        what: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Why it failed.
        error: std::io::Error,
    },
    /// A package that must not be loaded, because a package is code.
    #[error("the package {} is refused: {reason}; delete it, and it is compiled again", path.display())]
    Refused {
        /// The package.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A record that is not compiled here.
    #[error("the record {} is not compiled: {reason}", path.display())]
    RecordRefused {
        /// The record.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// A tensor that the compiled step cannot take.
    #[error("{what} is {found}, but the step was recorded with {expected}")]
    OtherTensor {
        /// Which tensor.
        what: String,
        /// What was recorded.
        expected: String,
        /// What was given.
        found: String,
    },
    /// A tensor of the batch of a kind that no compiled step takes.
    #[error("tensor {place} of the batch cannot be given to a compiled step: {reason}")]
    Unfit {
        /// Its place in the batch.
        place: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// As many steps as [`Options::shapes`](crate::Options::shapes) allows are compiled.
    #[error(
        "`Options::shapes` allows {shapes} compiled steps, and this is another one: in its shape, the model's modes, or the \
         optimizer's options"
    )]
    NoRoom {
        /// How many there may be.
        shapes: usize,
    },
    /// What a step depends on is replaced too often for it to be compiled.
    #[error(
        "the optimizer's options, groups or state were replaced again and again before a step could be compiled, which takes \
         three steps: learning rate and momentum may change at each step, and all else only now and then"
    )]
    AlwaysAnew,
    /// The optimizer failed.
    #[error(transparent)]
    Optimizer(#[from] OptimizerError),
    /// libtorch failed.
    #[error(transparent)]
    Torch(#[from] TorchError),
    /// The closure failed.
    #[error(transparent)]
    Step(BoxError),
}

/// The end of a message that names a place.
fn at(caller: &Option<String>) -> String {
    caller.as_ref().map(|caller| format!(" ({caller})")).unwrap_or_default()
}

impl From<tch::TchError> for CompileError {
    fn from(error: tch::TchError) -> Self {
        Self::Torch(error.into())
    }
}

impl CompileError {
    /// For [`Result::map_err`]: an error of the cache.
    pub(crate) fn cache(what: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |error| Self::Cache { what, path, error }
    }
}
