//! EfficientNet.

use overdrive_nn_macros::Module;
use tch::Tensor;

use super::blocks::{
    Activation, Conv2dNormActivation, SqueezeExcitation, StochasticDepth, builder, check_probability, conv, init_convs,
    pool,
};
use crate::{Dropout, Forward, Linear, NnError, Sequential, init, sequential};

/// For each stage: the factor by which its blocks expand the channels, the size of their kernels, the first block's
/// stride, the number of output channels, and the number of blocks.
const STAGES: [(i64, i64, i64, i64, usize); 7] = [
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
];

/// A network of inverted residuals with squeeze and excitation, B0; parameters have torchvision's names.
///
/// # Source
/// `torchvision.models.EfficientNet` of torchvision 0.26; Tan and Le, "EfficientNet: Rethinking Model Scaling for
/// Convolutional Neural Networks", 2019.
#[derive(Debug, Module)]
#[doc(alias = "EfficientNet")]
pub struct Efficientnet {
    /// All layers before the head.
    pub features: Sequential,
    /// Dropout and the head, a linear layer of 1280 features: replace them to train for other classes.
    pub classifier: Sequential,
}

builder! {
    Efficientnet => EfficientnetBuilder {
        /// The number of classes; default 1000.
        num_classes: i64 = 1000,
        /// The probability of dropout before the head; default 0.2.
        dropout: f64 = 0.2,
        /// The probability that the last block is left out in training, to which that of the others grows; default 0.2.
        stochastic_depth_prob: f64 = 0.2,
    }
}

/// EfficientNet-B0 with its defaults, for 1000 classes.
///
/// # Errors
/// When memory runs out.
///
/// # Source
/// `torchvision.models.efficientnet_b0`
pub fn efficientnet_b0() -> Result<Efficientnet, NnError> {
    Efficientnet::builder().build()
}

impl EfficientnetBuilder {
    /// The model with new weights.
    ///
    /// # Errors
    /// When an option is out of its range, or memory runs out.
    pub fn build(self) -> Result<Efficientnet, NnError> {
        let Self { num_classes, dropout, stochastic_depth_prob } = self;
        check_probability("Efficientnet", "stochastic_depth_prob", stochastic_depth_prob)?;
        let dropout = Dropout::new(dropout)?;
        let mut inputs = 32;
        let stem = Conv2dNormActivation::new(conv(3, inputs, 3).stride(2), Activation::Silu)?;
        let mut features = Sequential::new().append(stem);
        let total: usize = STAGES.iter().map(|stage| stage.4).sum();
        let mut done = 0;
        for (expansion, kernel_size, stride, outputs, blocks) in STAGES {
            let mut stage = Sequential::new();
            for number in 0..blocks {
                let stride = if number == 0 { stride } else { 1 };
                let p = stochastic_depth_prob * done as f64 / total as f64;
                stage.push(MbConv::new((inputs, outputs), expansion, kernel_size, stride, p)?);
                (inputs, done) = (outputs, done + 1);
            }
            features.push(stage);
        }
        features.push(Conv2dNormActivation::new(conv(inputs, 4 * inputs, 1), Activation::Silu)?);
        let head = Linear::new(4 * inputs, num_classes)?;
        init_convs(&features)?;
        let range = 1.0 / (num_classes as f64).sqrt();
        init::uniform_(&head.weight, -range, range)?;
        head.bias.as_deref().map_or(Ok(()), init::zeros_)?;
        Ok(Efficientnet { features, classifier: sequential![dropout, head] })
    }
}

impl Efficientnet {
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
struct MbConv {
    block: Sequential,
    stochastic_depth: StochasticDepth,
    is_residual: bool,
}

impl MbConv {
    fn new(channels: (i64, i64), expansion: i64, kernel_size: i64, stride: i64, p: f64) -> Result<Self, NnError> {
        let ((inputs, outputs), mut block) = (channels, Sequential::new());
        let expanded = inputs * expansion;
        if expansion != 1 {
            block.push(Conv2dNormActivation::new(conv(inputs, expanded, 1), Activation::Silu)?);
        }
        let depthwise = conv(expanded, expanded, kernel_size).stride(stride).groups(expanded);
        block.push(Conv2dNormActivation::new(depthwise, Activation::Silu)?);
        block.push(SqueezeExcitation::new(expanded, inputs / 4)?);
        block.push(Conv2dNormActivation::new(conv(expanded, outputs, 1), Activation::None)?);
        let is_residual = stride == 1 && inputs == outputs;
        Ok(Self { block, stochastic_depth: StochasticDepth::new(p), is_residual })
    }
}

impl Forward for MbConv {
    fn forward(&self, x: &Tensor) -> Result<Tensor, NnError> {
        let branch = self.block.forward(x)?;
        if !self.is_residual {
            return Ok(branch);
        }
        Ok(self.stochastic_depth.forward(branch)?.f_add_(x)?)
    }
}
