//! ResNet.

use overdrive_nn_macros::Module;
use tch::Tensor;

use super::blocks::{conv, init_convs, pool};
use crate::layer::at_least;
use crate::{BatchNorm2d, Conv2d, Forward, Linear, MaxPool2d, NnError, Sequential, sequential};

/// A residual network; parameters have torchvision's names.
///
/// # Source
/// `torchvision.models.ResNet` of torchvision 0.26; He et al., "Deep Residual Learning for Image Recognition", 2015.
#[derive(Debug, Module)]
#[doc(alias = "ResNet")]
pub struct Resnet {
    /// The first convolution.
    pub conv1: Conv2d,
    /// The first normalization.
    pub bn1: BatchNorm2d,
    /// The first stage: its feature maps have a quarter of the image's height and width.
    pub layer1: Sequential,
    /// The second stage: an eighth of the image's height and width.
    pub layer2: Sequential,
    /// The third stage: a sixteenth of the image's height and width.
    pub layer3: Sequential,
    /// The fourth stage: a thirty-second of the image's height and width.
    pub layer4: Sequential,
    /// The head: replace it to train for other classes.
    pub fc: Linear,
}

/// The kind of a [`Resnet`]'s blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResnetBlock {
    /// Two 3x3 convolutions.
    ///
    /// # Source
    /// `BasicBlock`
    #[doc(alias = "BasicBlock")]
    Basic,
    /// A bottleneck: a 1x1 convolution to a quarter of the output's channels, a 3x3 one, and a 1x1 one to all of them.
    ///
    /// # Source
    /// `Bottleneck`
    Bottleneck,
}

impl ResnetBlock {
    fn expansion(self) -> i64 {
        if self == Self::Basic { 1 } else { 4 }
    }
}

/// Options of a [`Resnet`].
#[derive(Clone, Copy, Debug)]
#[must_use = "options do nothing until `build`"]
pub struct ResnetBuilder {
    block: ResnetBlock,
    layers: [usize; 4],
    num_classes: i64,
}

/// ResNet-18 for 1000 classes, the same as `Resnet::builder(ResnetBlock::Basic, [2, 2, 2, 2])`.
///
/// # Errors
/// When memory runs out.
///
/// # Source
/// `torchvision.models.resnet18`
pub fn resnet18() -> Result<Resnet, NnError> {
    Resnet::builder(ResnetBlock::Basic, [2, 2, 2, 2]).build()
}

/// ResNet-34 for 1000 classes, the same as `Resnet::builder(ResnetBlock::Basic, [3, 4, 6, 3])`.
///
/// # Errors
/// When memory runs out.
///
/// # Source
/// `torchvision.models.resnet34`
pub fn resnet34() -> Result<Resnet, NnError> {
    Resnet::builder(ResnetBlock::Basic, [3, 4, 6, 3]).build()
}

/// ResNet-50 for 1000 classes, the same as `Resnet::builder(ResnetBlock::Bottleneck, [3, 4, 6, 3])`.
///
/// # Errors
/// When memory runs out.
///
/// # Source
/// `torchvision.models.resnet50`
pub fn resnet50() -> Result<Resnet, NnError> {
    Resnet::builder(ResnetBlock::Bottleneck, [3, 4, 6, 3]).build()
}

impl ResnetBuilder {
    /// The number of classes; default 1000.
    pub fn num_classes(mut self, num_classes: i64) -> Self {
        self.num_classes = num_classes;
        self
    }

    /// The model with new weights.
    ///
    /// # Errors
    /// When one of the four layers has no block, the number of classes is negative, or memory runs out.
    pub fn build(self) -> Result<Resnet, NnError> {
        let Self { block, layers, num_classes } = self;
        layers.iter().try_for_each(|count| at_least("Resnet", "layers", *count as i64, 1))?;
        let mut channels = 64;
        let conv1 = conv(3, channels, 7).stride(2).build()?;
        let bn1 = BatchNorm2d::new(channels)?;
        let mut layer = |planes: i64, count: usize, stride: i64| -> Result<Sequential, NnError> {
            let mut layer = Sequential::new();
            for number in 0..count {
                let stride = if number == 0 { stride } else { 1 };
                match block {
                    ResnetBlock::Basic => layer.push(BasicBlock::new(channels, planes, stride)?),
                    ResnetBlock::Bottleneck => layer.push(Bottleneck::new(channels, planes, stride)?),
                }
                channels = planes * block.expansion();
            }
            Ok(layer)
        };
        let resnet = Resnet {
            conv1,
            bn1,
            layer1: layer(64, layers[0], 1)?,
            layer2: layer(128, layers[1], 2)?,
            layer3: layer(256, layers[2], 2)?,
            layer4: layer(512, layers[3], 2)?,
            fc: Linear::new(512 * block.expansion(), num_classes)?,
        };
        init_convs(&resnet)?;
        Ok(resnet)
    }
}

impl Resnet {
    /// A builder with options: the kind of the blocks, and how many of them each of the four layers has.
    pub fn builder(block: ResnetBlock, layers: [usize; 4]) -> ResnetBuilder {
        ResnetBuilder { block, layers, num_classes: 1000 }
    }

    /// # Shapes
    /// `[batch, 3, height, width]` to `[batch, num_classes]`.
    ///
    /// # Errors
    /// When the input has another shape, dtype or device.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor, NnError> {
        let x = self.bn1.forward(&self.conv1.forward(x)?)?.f_relu_()?;
        let x = MaxPool2d::new(3).stride(2).padding(1).forward(&x)?;
        let x = self.layer2.forward(&self.layer1.forward(&x)?)?;
        let x = self.layer4.forward(&self.layer3.forward(&x)?)?;
        self.fc.forward(&pool(&x)?)
    }
}

/// A 1x1 convolution with batch normalization that gives a block's input the shape of its output; `None` where the
/// shapes are the same.
fn downsample(inputs: i64, outputs: i64, stride: i64) -> Result<Option<Sequential>, NnError> {
    if stride == 1 && inputs == outputs {
        return Ok(None);
    }
    Ok(Some(sequential![conv(inputs, outputs, 1).stride(stride).build()?, BatchNorm2d::new(outputs)?]))
}

/// The end of a block: adds the block's input, projected if need be, to its output, then applies ReLU.
fn add(mut out: Tensor, x: &Tensor, downsample: &Option<Sequential>) -> Result<Tensor, NnError> {
    let mut out = match downsample {
        Some(downsample) => out.f_add_(&downsample.forward(x)?)?,
        None => out.f_add_(x)?,
    };
    Ok(out.f_relu_()?)
}

#[derive(Debug, Module)]
struct BasicBlock {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    conv2: Conv2d,
    bn2: BatchNorm2d,
    downsample: Option<Sequential>,
}

impl BasicBlock {
    fn new(inputs: i64, planes: i64, stride: i64) -> Result<Self, NnError> {
        // First, as in torchvision: layers draw random numbers for their weights in the order in which they are made.
        let downsample = downsample(inputs, planes, stride)?;
        let (conv1, bn1) = (conv(inputs, planes, 3).stride(stride).build()?, BatchNorm2d::new(planes)?);
        let (conv2, bn2) = (conv(planes, planes, 3).build()?, BatchNorm2d::new(planes)?);
        Ok(Self { conv1, bn1, conv2, bn2, downsample })
    }
}

impl Forward for BasicBlock {
    fn forward(&self, x: &Tensor) -> Result<Tensor, NnError> {
        let out = self.bn1.forward(&self.conv1.forward(x)?)?.f_relu_()?;
        let out = self.bn2.forward(&self.conv2.forward(&out)?)?;
        add(out, x, &self.downsample)
    }
}

#[derive(Debug, Module)]
struct Bottleneck {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    conv2: Conv2d,
    bn2: BatchNorm2d,
    conv3: Conv2d,
    bn3: BatchNorm2d,
    downsample: Option<Sequential>,
}

impl Bottleneck {
    fn new(inputs: i64, planes: i64, stride: i64) -> Result<Self, NnError> {
        let downsample = downsample(inputs, 4 * planes, stride)?;
        let (conv1, bn1) = (conv(inputs, planes, 1).build()?, BatchNorm2d::new(planes)?);
        let (conv2, bn2) = (conv(planes, planes, 3).stride(stride).build()?, BatchNorm2d::new(planes)?);
        let (conv3, bn3) = (conv(planes, 4 * planes, 1).build()?, BatchNorm2d::new(4 * planes)?);
        Ok(Self { conv1, bn1, conv2, bn2, conv3, bn3, downsample })
    }
}

impl Forward for Bottleneck {
    fn forward(&self, x: &Tensor) -> Result<Tensor, NnError> {
        let out = self.bn1.forward(&self.conv1.forward(x)?)?.f_relu_()?;
        let out = self.bn2.forward(&self.conv2.forward(&out)?)?.f_relu_()?;
        let out = self.bn3.forward(&self.conv3.forward(&out)?)?;
        add(out, x, &self.downsample)
    }
}
