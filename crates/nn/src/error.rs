//! What can go wrong in a module.

use overdrive_core::ForwardError;
use overdrive_ffi::Error as TorchError;
use overdrive_ffi::autograd::BoxError;

/// Why a module could not be made, or did not compute.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NnError {
    /// An option is out of its range.
    #[error("{layer}: `{option}` is {found}, but has to be {expected}")]
    InvalidOption {
        /// The type of the layer.
        layer: &'static str,
        /// The option.
        option: &'static str,
        /// What was given.
        found: String,
        /// What would be right.
        expected: String,
    },
    /// A layer refused its input.
    #[error("{layer}: {source}")]
    Forward {
        /// The layer's name in the model, its type and options: `fc1: Linear(in_features=4, ..)`. A name that begins
        /// with a dot, `.2`, is the place in the `Sequential` that was called, because the model was not walked yet.
        layer: String,
        /// What libtorch says.
        source: TorchError,
    },
    /// A function was given a tensor of a shape that it cannot take.
    #[error("`{function}` needs {expected}, not a tensor of shape {shape:?}")]
    InvalidShape {
        /// The function.
        function: &'static str,
        /// What would be right.
        expected: String,
        /// The tensor's shape.
        shape: Vec<i64>,
    },
    /// The forward pass of a [`Function`](crate::autograd::Function) failed.
    #[error("{function}: {source}")]
    Function {
        /// The function.
        function: &'static str,
        /// What it returned.
        source: BoxError,
    },
    /// There are more or fewer tensors than asked for.
    #[error("{what}: {expected} are asked for, but there are {found}")]
    TensorCount {
        /// The tensors.
        what: &'static str,
        /// How many were asked for.
        expected: usize,
        /// How many there are.
        found: usize,
    },
    /// Something that a module calls and that is no module, such as a checkpointed function, failed.
    #[error(transparent)]
    Part(BoxError),
    /// libtorch failed.
    #[error(transparent)]
    Torch(TorchError),
}

impl NnError {
    /// The error of a module at this place of a `Sequential`.
    pub(crate) fn at(self, place: usize) -> Self {
        let Self::Forward { layer, source } = self else { return self };
        let has_name = layer.split('(').next().is_some_and(|head| head.contains(": "));
        let layer = match has_name {
            true if layer.starts_with('.') => format!(".{place}{layer}"),
            true => layer,
            false => format!(".{place}: {layer}"),
        };
        Self::Forward { layer, source }
    }
}

/// tch's errors, and those of other crates' parts.
impl<E: ForwardError> From<E> for NnError {
    fn from(error: E) -> Self {
        error.into_torch().map_or_else(|error| Self::Part(Box::new(error)), Self::Torch)
    }
}
