//! Parts that several models share.

use overdrive_core::{Module, ModuleState};
use overdrive_ffi::{Arg, LazyOp};
use overdrive_nn_macros::Module;
use tch::Tensor;

use crate::conv::ConvBuilder;
use crate::init::{self, Fan, Nonlinearity};
use crate::layer::run;
use crate::{AdaptiveAvgPool2d, BatchNorm2d, Conv2d, Flatten, Forward, NnError};

static RELU6_: LazyOp = LazyOp::new("aten::relu6_", "");

/// Defines a model's builder: its options, their defaults, and a function for each.
macro_rules! builder {
    ($model:ident => $builder:ident { $($(#[$doc:meta])* $option:ident: $kind:ty = $default:expr,)+ }) => {
        #[doc = concat!("Options of a [`", stringify!($model), "`].")]
        #[derive(Clone, Copy, Debug)]
        #[must_use = "options do nothing until `build`"]
        pub struct $builder {
            $($option: $kind,)+
        }

        impl $builder {
            $(
                $(#[$doc])*
                pub fn $option(mut self, $option: $kind) -> Self {
                    self.$option = $option;
                    self
                }
            )+
        }

        impl $model {
            /// A builder with options.
            pub fn builder() -> $builder {
                $builder { $($option: $default,)+ }
            }
        }
    };
}

pub(super) use builder;

/// A convolution without a bias, padded so that only the stride changes the size of the image.
pub(super) fn conv(inputs: i64, outputs: i64, kernel_size: i64) -> ConvBuilder<2> {
    Conv2d::builder(inputs, outputs, kernel_size).padding((kernel_size - 1) / 2).bias(false)
}

/// The number of channels, rounded to a multiple of 8 that is at least 8.
///
/// # Source
/// `_make_divisible` of torchvision
pub(super) fn make_divisible(channels: f64) -> i64 {
    let rounded = ((channels + 4.0) as i64 / 8 * 8).max(8);
    // Rounding down must not take more than a tenth.
    if (rounded as f64) < 0.9 * channels { rounded.saturating_add(8) } else { rounded }
}

/// Draws the initial values of all convolutions in a module.
pub(super) fn init_convs<M: Module>(module: &M) -> Result<(), NnError> {
    for (_, module) in module.named_modules() {
        if let Some(conv) = module.downcast_ref::<Conv2d>() {
            init::kaiming_normal_(&conv.weight, 0.0, Fan::Out, Nonlinearity::Relu)?;
            conv.bias.as_deref().map_or(Ok(()), init::zeros_)?;
        }
    }
    Ok(())
}

/// The mean of each channel, `[batch, channels]`.
pub(super) fn pool(x: &Tensor) -> Result<Tensor, NnError> {
    Flatten::new().forward(&AdaptiveAvgPool2d::new(1).forward(x)?)
}

/// The activation at the end of a [`Conv2dNormActivation`], computed in place.
#[derive(Clone, Copy, Debug)]
pub(super) enum Activation {
    Relu6,
    Silu,
    None,
}

/// A convolution, batch normalization and an activation.
///
/// # Source
/// `torchvision.ops.Conv2dNormActivation`
#[derive(Debug, Module)]
pub(super) struct Conv2dNormActivation(Conv2d, BatchNorm2d, #[module(skip)] Activation);

impl Conv2dNormActivation {
    pub(super) fn new(conv: ConvBuilder<2>, activation: Activation) -> Result<Self, NnError> {
        let conv = conv.build()?;
        let norm = BatchNorm2d::new(conv.weight.size()[0])?;
        Ok(Self(conv, norm, activation))
    }
}

impl Forward for Conv2dNormActivation {
    fn forward(&self, x: &Tensor) -> Result<Tensor, NnError> {
        let mut x = self.1.forward(&self.0.forward(x)?)?;
        Ok(match self.2 {
            Activation::Relu6 => RELU6_.tensor(&[Arg::Tensor(&x)])?,
            Activation::Silu => x.f_silu_()?,
            Activation::None => x,
        })
    }
}

/// Multiplies each channel by a weight that two layers compute from the means of all channels.
///
/// # Source
/// `torchvision.ops.SqueezeExcitation` with SiLU; Hu et al., "Squeeze-and-Excitation Networks", 2017.
#[derive(Debug, Module)]
pub(super) struct SqueezeExcitation {
    avgpool: AdaptiveAvgPool2d,
    fc1: Conv2d,
    fc2: Conv2d,
}

impl SqueezeExcitation {
    pub(super) fn new(channels: i64, squeezed: i64) -> Result<Self, NnError> {
        Ok(Self {
            avgpool: AdaptiveAvgPool2d::new(1),
            fc1: Conv2d::new(channels, squeezed, 1)?,
            fc2: Conv2d::new(squeezed, channels, 1)?,
        })
    }
}

impl Forward for SqueezeExcitation {
    fn forward(&self, x: &Tensor) -> Result<Tensor, NnError> {
        let squeezed = self.fc1.forward(&self.avgpool.forward(x)?)?.f_silu_()?;
        Ok(self.fc2.forward(&squeezed)?.f_sigmoid()?.f_mul(x)?)
    }
}

/// Drops a residual branch for some of the rows of a batch; `p` is below 1.
///
/// # Source
/// `torchvision.ops.StochasticDepth` by rows; Huang et al., "Deep Networks with Stochastic Depth", 2016.
#[derive(Debug, Module)]
pub(super) struct StochasticDepth {
    p: f64,
    state: ModuleState,
}

impl StochasticDepth {
    pub(super) fn new(p: f64) -> Self {
        Self { p, state: ModuleState::default() }
    }

    pub(super) fn forward(&self, x: Tensor) -> Result<Tensor, NnError> {
        if self.p == 0.0 || !self.state.is_training() {
            return Ok(x);
        }
        run(self, &self.state, || {
            let mut size = vec![1; x.dim()];
            size[0] = x.size()[0];
            let survival = 1.0 - self.p;
            let noise = Tensor::f_empty(&size, (x.kind(), x.device()))?.f_bernoulli_float_(survival)?;
            x.f_mul(&(noise / survival))
        })
    }
}

/// An error unless an option is a probability.
pub(super) fn check_probability(layer: &'static str, option: &'static str, p: f64) -> Result<(), NnError> {
    if (0.0..=1.0).contains(&p) {
        return Ok(());
    }
    let (found, expected) = (p.to_string(), "at least 0 and at most 1".to_owned());
    Err(NnError::InvalidOption { layer, option, found, expected })
}
