//! Modules with PyTorch's names, options and initial values, over tch's tensors.
//!
//! A model written here draws its initial values from libtorch's generator in PyTorch's order, so that the same seed gives
//! the same network, to the bit, as the Python program that it was ported from.
//!
//! ```
//! use overdrive_nn::{Linear, Module};
//! use tch::Tensor;
//!
//! #[derive(Debug, Module)]
//! struct Net {
//!     fc1: Linear,
//!     fc2: Linear,
//! }
//!
//! impl Net {
//!     fn new() -> Result<Self, overdrive_nn::NnError> {
//!         Ok(Self { fc1: Linear::new(4, 8)?, fc2: Linear::new(8, 2)? })
//!     }
//!
//!     fn forward(&self, x: &Tensor) -> Result<Tensor, overdrive_nn::NnError> {
//!         self.fc2.forward(&self.fc1.forward(x)?.relu())
//!     }
//! }
//!
//! # fn main() -> Result<(), overdrive_nn::NnError> {
//! tch::manual_seed(0);
//! let net = Net::new()?;
//! let names: Vec<_> = net.named_parameters().iter().map(|it| it.name().unwrap_or_default().to_owned()).collect();
//! assert_eq!(names, ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]);
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

extern crate self as overdrive_nn;

mod activation;
mod attention;
pub mod autograd;
mod batch_norm;
mod containers;
mod conv;
mod conv_transpose;
mod dropout;
mod embedding;
mod error;
mod files;
pub mod init;
mod layer;
mod linear;
mod loading;
pub mod metrics;
pub mod models;
mod norm;
mod pooling;
mod recurrent;
mod repr;
mod size;
mod summary;
mod tensors;
mod transformer;
mod update_bn;

pub use activation::{
    Elu, Gelu, GeluTanh, Hardsigmoid, Hardswish, Identity, LeakyRelu, LogSigmoid, LogSoftmax, Mish, Prelu, Relu, Relu6,
    Selu, Sigmoid, Silu, Softmax, Softplus, Tanh,
};
pub use attention::{Attend, MultiheadAttention, MultiheadAttentionBuilder, generate_square_subsequent_mask};
pub use batch_norm::{BatchNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d, BatchNormBuilder};
pub use containers::{Forward, ModuleList, Sequential};
pub use conv::{Conv, Conv1d, Conv2d, Conv3d, ConvBuilder, Padding, PaddingMode};
pub use conv_transpose::{ConvTranspose, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d, ConvTransposeBuilder};
pub use dropout::{AlphaDropout, Dropout, Dropout1d, Dropout2d, Dropout3d};
pub use embedding::{Embedding, EmbeddingBuilder};
pub use error::NnError;
pub use files::{FileError, load_dcp, load_pt, load_safetensors, save_safetensors, save_sharded};
pub use linear::{Bilinear, Linear, LinearBuilder};
pub use loading::{Incompatible, LoadError, LoadStateDict, Mismatch};
pub use norm::{GroupNorm, GroupNormBuilder, LayerNorm, LayerNormBuilder, RmsNorm, RmsNormBuilder};
pub use overdrive_core::{
    Module, ModuleId, ModuleState, Part, StateDict, StateError, Stateful, To, Visitor, load_module_state,
    module_entries, module_state,
};
pub use overdrive_nn_macros::Module;
pub use pooling::{
    AdaptiveAvgPool, AdaptiveAvgPool1d, AdaptiveAvgPool2d, AdaptiveAvgPool3d, AvgPool, AvgPool1d, AvgPool2d, AvgPool3d,
    Flatten, MaxPool, MaxPool1d, MaxPool2d, MaxPool3d,
};
pub use recurrent::{Gru, Lstm, RecurrentBuilder};
pub use repr::repr;
pub use size::{Shape, Size};
pub use summary::{Summary, SummaryRow, summary};
pub use tensors::{Buffer, Parameter};
pub use transformer::{
    Encode, TransformerActivation, TransformerEncoder, TransformerEncoderBuilder, TransformerEncoderLayer,
    TransformerEncoderLayerBuilder,
};
pub use update_bn::update_bn;
