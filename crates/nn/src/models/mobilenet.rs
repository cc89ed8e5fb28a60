//! MobileNet.

use overdrive_nn_macros::Module;
use tch::Tensor;

use super::blocks::{Activation, Conv2dNormActivation, builder, conv, init_convs, make_divisible, pool};
use crate::{BatchNorm2d, Dropout, Forward, Linear, NnError, Sequential, init, sequential};

/// For each stage: the factor by which its blocks expand the channels, the number of output channels, the number of
/// blocks, and the first block's stride.
const STAGES: [(i64, i64, usize, i64); 7] =
    [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)];

/// A network of inverted residuals, for small devices; parameters have torchvision's names.
///
/// # Source
/// `torchvision.models.MobileNetV2` of torchvision 0.26; Sandler et al., "MobileNetV2: Inverted Residuals and Linear
/// Bottlenecks", 2018.
#[derive(Debug, Module)]
#[doc(alias = "MobileNetV2")]
pub struct MobilenetV2 {
    /// All layers before the head.
    pub features: Sequential,
    /// Dropout and the head, a linear layer of 1280 features: replace them to train for other classes.
    pub classifier: Sequential,
}

builder! {
    MobilenetV2 => MobilenetV2Builder {
        /// The number of classes; default 1000.
        num_classes: i64 = 1000,
        /// By how much the numbers of channels are multiplied; default 1.
        width_mult: f64 = 1.0,
        /// The probability of dropout before the head; default 0.2.
        dropout: f64 = 0.2,
    }
}

/// MobileNetV2 with its defaults, for 1000 classes.
///
/// # Errors
/// When memory runs out.
///
/// # Source
/// `torchvision.models.mobilenet_v2`
pub fn mobilenet_v2() -> Result<MobilenetV2, NnError> {
    MobilenetV2::builder().build()
}

impl MobilenetV2Builder {
    /// The model with new weights.
    ///
    /// # Errors
    /// When an option is out of its range, or memory runs out.
    pub fn build(self) -> Result<MobilenetV2, NnError> {
        let Self { num_classes, width_mult, dropout } = self;
        if !(width_mult > 0.0 && width_mult.is_finite()) {
            let (found, expected) = (width_mult.to_string(), "positive and finite".to_owned());
            return Err(NnError::InvalidOption { layer: "MobilenetV2", option: "width_mult", found, expected });
        }
        let dropout = Dropout::new(dropout)?;
        let scaled = |channels: i64| make_divisible(channels as f64 * width_mult);
        let (mut inputs, last) = (scaled(32), make_divisible(1280.0 * width_mult.max(1.0)));
        let stem = Conv2dNormActivation::new(conv(3, inputs, 3).stride(2), Activation::Relu6)?;
        let mut features = Sequential::new().append(stem);
        for (expansion, channels, blocks, stride) in STAGES {
            let outputs = scaled(channels);
            for number in 0..blocks {
                let stride = if number == 0 { stride } else { 1 };
                features.push(InvertedResidual::new(inputs, outputs, stride, expansion)?);
                inputs = outputs;
            }
        }
        features.push(Conv2dNormActivation::new(conv(inputs, last, 1), Activation::Relu6)?);
        let head = Linear::new(last, num_classes)?;
        init_convs(&features)?;
        init::normal_(&head.weight, 0.0, 0.01)?;
        head.bias.as_deref().map_or(Ok(()), init::zeros_)?;
        Ok(MobilenetV2 { features, classifier: sequential![dropout, head] })
    }
}

impl MobilenetV2 {
    /// # Shapes
    /// `[batch, 3, height, width]` to `[batch, num_classes]`.
    ///
    /// # Errors
    /// When the input has another shape, dtype or device.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor, NnError> {
        self.classifier.forward(&pool(&self.features.forward(x)?)?)
    }
}

#[derive(Debug, Module)]
struct InvertedResidual {
    conv: Sequential,
    is_residual: bool,
}

impl InvertedResidual {
    fn new(inputs: i64, outputs: i64, stride: i64, expansion: i64) -> Result<Self, NnError> {
        let (hidden, mut layers) = (inputs * expansion, Sequential::new());
        if expansion != 1 {
            layers.push(Conv2dNormActivation::new(conv(inputs, hidden, 1), Activation::Relu6)?);
        }
        let depthwise = conv(hidden, hidden, 3).stride(stride).groups(hidden);
        layers.push(Conv2dNormActivation::new(depthwise, Activation::Relu6)?);
        layers.push(conv(hidden, outputs, 1).build()?);
        layers.push(BatchNorm2d::new(outputs)?);
        Ok(Self { conv: layers, is_residual: stride == 1 && inputs == outputs })
    }
}

impl Forward for InvertedResidual {
    fn forward(&self, x: &Tensor) -> Result<Tensor, NnError> {
        let branch = self.conv.forward(x)?;
        Ok(if self.is_residual { x.f_add(&branch)? } else { branch })
    }
}
