//! What can go wrong in a module.

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
        /// The layer's place in the model, its type and options.
        layer: String,
        /// What libtorch says.
        source: TorchError,
    },
    /// A tensor cannot be initialized like this.
    #[error("`{function}` needs {expected}, not a tensor of shape {shape:?}")]
    InvalidShape {
        /// The function of [`init`](crate::init).
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
    /// libtorch failed.
    #[error(transparent)]
    Torch(#[from] TorchError),
}

impl From<tch::TchError> for NnError {
    fn from(error: tch::TchError) -> Self {
        Self::Torch(error.into())
    }
}
