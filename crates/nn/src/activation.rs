//! Activations. Those without options are values: `sequential![Linear::new(4, 8)?, Relu]`.

use overdrive_core::ModuleState;
use overdrive_ffi::{Arg, LazyOp};
use overdrive_nn_macros::Module;
use tch::Tensor;

use crate::containers::forwards;
use crate::error::NnError;
use crate::init;
use crate::layer::{at_least, empty, run, run_nameless};
use crate::tensors::Parameter;

// tch has these without their options.
static ELU: LazyOp = LazyOp::new("aten::elu", "");
static LEAKY_RELU: LazyOp = LazyOp::new("aten::leaky_relu", "");
static RELU6: LazyOp = LazyOp::new("aten::relu6", "");

macro_rules! activations {
    ($($(#[$doc:meta])* $name:ident, $text:literal, $x:ident => $operator:expr;)+) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, Module)]
        #[module(describe)]
        pub struct $name;

        impl $name {
            /// Applies it to each element; the shape stays.
            ///
            /// # Errors
            /// When libtorch refuses the input.
            pub fn forward(&self, $x: &Tensor) -> Result<Tensor, NnError> {
                run_nameless(self, || $operator)
            }

            fn describe(&self) -> String {
                $text.to_owned()
            }
        }

        forwards!($name);
    )+};
}

activations! {
    /// `max(x, 0)`
    ///
    /// # Source
    /// `torch.nn.ReLU`
    #[doc(alias = "ReLU")]
    Relu, "ReLU()", x => x.f_relu();
    /// `min(max(x, 0), 6)`
    ///
    /// # Source
    /// `torch.nn.ReLU6`
    #[doc(alias = "ReLU6")]
    Relu6, "ReLU6()", x => RELU6.tensor(&[Arg::Tensor(x)]);
    /// `x * Phi(x)`
    ///
    /// # Source
    /// `torch.nn.GELU`
    #[doc(alias = "GELU")]
    Gelu, "GELU(approximate='none')", x => x.f_gelu("none");
    /// GELU by its approximation with tanh.
    ///
    /// # Source
    /// `torch.nn.GELU(approximate='tanh')`
    GeluTanh, "GELU(approximate='tanh')", x => x.f_gelu("tanh");
    /// `x * sigmoid(x)`
    ///
    /// # Source
    /// `torch.nn.SiLU`
    #[doc(alias = "SiLU")]
    #[doc(alias = "Swish")]
    Silu, "SiLU()", x => x.f_silu();
    /// `x * tanh(softplus(x))`
    ///
    /// # Source
    /// `torch.nn.Mish`
    Mish, "Mish()", x => x.f_mish();
    /// The hyperbolic tangent.
    ///
    /// # Source
    /// `torch.nn.Tanh`
    Tanh, "Tanh()", x => x.f_tanh();
    /// The logistic function.
    ///
    /// # Source
    /// `torch.nn.Sigmoid`
    Sigmoid, "Sigmoid()", x => x.f_sigmoid();
    /// `log(sigmoid(x))`
    ///
    /// # Source
    /// `torch.nn.LogSigmoid`
    LogSigmoid, "LogSigmoid()", x => x.f_log_sigmoid();
    /// The scaled exponential linear unit.
    ///
    /// # Source
    /// `torch.nn.SELU`
    #[doc(alias = "SELU")]
    Selu, "SELU()", x => x.f_selu();
    /// `x * relu6(x + 3) / 6`
    ///
    /// # Source
    /// `torch.nn.Hardswish`
    Hardswish, "Hardswish()", x => x.f_hardswish();
    /// `relu6(x + 3) / 6`
    ///
    /// # Source
    /// `torch.nn.Hardsigmoid`
    Hardsigmoid, "Hardsigmoid()", x => x.f_hardsigmoid();
    /// `log(1 + exp(x))`
    ///
    /// # Source
    /// `torch.nn.Softplus`
    Softplus, "Softplus(beta=1.0, threshold=20.0)", x => x.f_softplus();
    /// Returns its input.
    ///
    /// # Source
    /// `torch.nn.Identity`
    Identity, "Identity()", x => Ok::<_, tch::TchError>(x.shallow_clone());
}

/// `max(x, negative_slope * x)`
///
/// # Source
/// `torch.nn.LeakyReLU`, whose default slope is 0.01
#[derive(Clone, Copy, Debug, Module)]
#[module(describe)]
#[doc(alias = "LeakyReLU")]
pub struct LeakyRelu(
    /// The slope of the negative part.
    pub f64,
);

impl LeakyRelu {
    /// Applies it to each element; the shape stays.
    ///
    /// # Errors
    /// When libtorch refuses the input.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor, NnError> {
        run_nameless(self, || LEAKY_RELU.tensor(&[Arg::Tensor(input), Arg::Double(self.0)]))
    }

    fn describe(&self) -> String {
        format!("LeakyReLU(negative_slope={:?})", self.0)
    }
}

/// `x`, or `alpha * (exp(x) - 1)` below 0.
///
/// # Source
/// `torch.nn.ELU`, whose default alpha is 1
#[derive(Clone, Copy, Debug, Module)]
#[module(describe)]
#[doc(alias = "ELU")]
pub struct Elu(
    /// The limit of the negative part.
    pub f64,
);

impl Elu {
    /// Applies it to each element; the shape stays.
    ///
    /// # Errors
    /// When libtorch refuses the input.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor, NnError> {
        run_nameless(self, || ELU.tensor(&[Arg::Tensor(input), Arg::Double(self.0)]))
    }

    fn describe(&self) -> String {
        format!("ELU(alpha={:?})", self.0)
    }
}

/// Shares that add up to 1 over a dimension.
///
/// # Source
/// `torch.nn.Softmax`
#[derive(Clone, Copy, Debug, Module)]
#[module(describe)]
pub struct Softmax(
    /// The dimension.
    pub i64,
);

impl Softmax {
    /// The shape stays.
    ///
    /// # Errors
    /// When the input does not have the dimension.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor, NnError> {
        run_nameless(self, || input.f_softmax(self.0, None))
    }

    fn describe(&self) -> String {
        format!("Softmax(dim={})", self.0)
    }
}

/// The logarithm of [`Softmax`].
///
/// # Source
/// `torch.nn.LogSoftmax`
#[derive(Clone, Copy, Debug, Module)]
#[module(describe)]
pub struct LogSoftmax(
    /// The dimension.
    pub i64,
);

impl LogSoftmax {
    /// The shape stays.
    ///
    /// # Errors
    /// When the input does not have the dimension.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor, NnError> {
        run_nameless(self, || input.f_log_softmax(self.0, None))
    }

    fn describe(&self) -> String {
        format!("LogSoftmax(dim={})", self.0)
    }
}

/// `max(x, weight * x)` with a learned slope, one for all channels or one each.
///
/// # Source
/// `torch.nn.PReLU`
#[derive(Debug, Module)]
#[module(describe)]
#[doc(alias = "PReLU")]
pub struct Prelu {
    /// `[num_parameters]`.
    pub weight: Parameter,
    state: ModuleState,
}

impl Prelu {
    /// PyTorch's defaults are one parameter and an initial slope of 0.25.
    ///
    /// # Errors
    /// When `num_parameters` is not positive, or memory runs out.
    pub fn new(num_parameters: i64, init: f64) -> Result<Self, NnError> {
        at_least("Prelu", "num_parameters", num_parameters, 1)?;
        let weight = empty(&[num_parameters])?;
        init::constant_(&weight, init)?;
        Ok(Self { weight: Parameter::new(&weight)?, state: ModuleState::default() })
    }

    /// # Shapes
    /// `[batch, num_parameters, ..]` to the same; any shape with one parameter.
    ///
    /// # Errors
    /// When the number of channels differs.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor, NnError> {
        run(self, &self.state, || input.f_prelu(&self.weight))
    }

    fn describe(&self) -> String {
        format!("PReLU(num_parameters={})", self.weight.size()[0])
    }
}

forwards!(LeakyRelu, Elu, Softmax, LogSoftmax, Prelu);
