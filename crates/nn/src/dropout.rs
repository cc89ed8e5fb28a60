//! Dropout.

use overdrive_core::ModuleState;
use overdrive_nn_macros::Module;
use tch::{TchError, Tensor};

use crate::error::NnError;
use crate::layer::run;

macro_rules! dropouts {
    ($($(#[$doc:meta])* $name:ident, $operator:expr;)+) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug, Module)]
        #[module(describe)]
        pub struct $name {
            p: f64,
            state: ModuleState,
        }

        impl $name {
            /// Drops with probability `p`; PyTorch's default is 0.5.
            ///
            /// # Errors
            /// When `p` is outside [0, 1].
            pub fn new(p: f64) -> Result<Self, NnError> {
                if !(0.0..=1.0).contains(&p) {
                    let (found, expected) = (p.to_string(), "at least 0 and at most 1".to_owned());
                    return Err(NnError::InvalidOption { layer: stringify!($name), option: "p", found, expected });
                }
                Ok(Self { p, state: ModuleState::default() })
            }

            /// Drops in training mode, and scales what is left by `1 / (1 - p)`; in evaluation mode returns its input.
            ///
            /// # Errors
            /// When libtorch refuses the input.
            pub fn forward(&self, input: &Tensor) -> Result<Tensor, NnError> {
                run(self, &self.state, || $operator(input, self.p, self.state.is_training()))
            }

            fn describe(&self) -> String {
                format!("{}(p={:?}, inplace=False)", stringify!($name), self.p)
            }
        }
    )+};
}

dropouts! {
    /// Drops elements.
    ///
    /// # Source
    /// `torch.nn.Dropout`; Srivastava et al., "Dropout", 2014.
    Dropout, Tensor::f_dropout;
    /// Drops whole channels of `[batch, channels, length]` or `[channels, length]`.
    ///
    /// # Source
    /// `torch.nn.Dropout1d`
    Dropout1d, dropout1d;
    /// Drops whole channels of `[batch, channels, height, width]`. As in PyTorch, three dimensions are
    /// `[batch, channels, length]`.
    ///
    /// # Source
    /// `torch.nn.Dropout2d`
    Dropout2d, Tensor::f_feature_dropout;
    /// Drops whole channels of `[batch, channels, depth, height, width]`; a tensor of other than five dimensions is one
    /// without a batch.
    ///
    /// # Source
    /// `torch.nn.Dropout3d`
    Dropout3d, dropout3d;
    /// Drops elements and keeps mean and variance; for use with SELU.
    ///
    /// # Source
    /// `torch.nn.AlphaDropout`; Klambauer et al., "Self-Normalizing Neural Networks", 2017.
    AlphaDropout, Tensor::f_alpha_dropout;
}

fn dropout1d(input: &Tensor, p: f64, train: bool) -> Result<Tensor, TchError> {
    match input.dim() {
        2 => input.f_unsqueeze(0)?.f_feature_dropout(p, train)?.f_squeeze_dim(0),
        3 => input.f_feature_dropout(p, train),
        _ => Err(TchError::Shape(format!("expected 2 or 3 dimensions, got shape {:?}", input.size()))),
    }
}

fn dropout3d(input: &Tensor, p: f64, train: bool) -> Result<Tensor, TchError> {
    match input.dim() {
        5 => input.f_feature_dropout(p, train),
        _ => input.f_unsqueeze(0)?.f_feature_dropout(p, train)?.f_squeeze_dim(0),
    }
}
