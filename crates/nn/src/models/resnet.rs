//! ResNet.

use overdrive_core::Module as _;
use overdrive_nn_macros::Module;
use tch::Tensor;

use crate::init::{self, Fan, Nonlinearity};
use crate::{AdaptiveAvgPool2d, BatchNorm2d, Conv2d, Flatten, Forward, Linear, MaxPool2d, NnError, Sequential};

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
    maxpool: MaxPool2d,
    /// Blocks of the first size.
    pub layer1: Sequential,
    /// Blocks of half the size.
    pub layer2: Sequential,
    /// Blocks of a quarter of the size.
    pub layer3: Sequential,
    /// Blocks of an eighth of the size.
    pub layer4: Sequential,
    avgpool: AdaptiveAvgPool2d,
    /// The head: replace it to train for other classes.
    pub fc: Linear,
}

/// With 18 layers, for 1000 classes.
///
/// # Errors
/// When memory runs out.
///
/// # Source
/// `torchvision.models.resnet18`
pub fn resnet18() -> Result<Resnet, NnError> {
    Resnet::new(Kind::Basic, [2, 2, 2, 2], 1000)
}

/// With 34 layers, for 1000 classes.
///
/// # Errors
/// When memory runs out.
///
/// # Source
/// `torchvision.models.resnet34`
pub fn resnet34() -> Result<Resnet, NnError> {
    Resnet::new(Kind::Basic, [3, 4, 6, 3], 1000)
}

/// With 50 layers, for 1000 classes.
///
/// # Errors
/// When memory runs out.
///
/// # Source
/// `torchvision.models.resnet50`
pub fn resnet50() -> Result<Resnet, NnError> {
    Resnet::new(Kind::Bottleneck, [3, 4, 6, 3], 1000)
}

/// The kind of its blocks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Two convolutions.
    Basic,
    /// Three, of which the middle one has a quarter of the channels.
    Bottleneck,
}

impl Kind {
    fn expansion(self) -> i64 {
        if self == Self::Basic { 1 } else { 4 }
    }
}

impl Resnet {
    fn new(kind: Kind, blocks: [usize; 4], num_classes: i64) -> Result<Self, NnError> {
        let mut channels = 64;
        let conv1 = Conv2d::builder(3, 64, 7).stride(2).padding(3).bias(false).build()?;
        let bn1 = BatchNorm2d::new(64)?;
        let mut layer = |planes: i64, count: usize, stride: i64| -> Result<Sequential, NnError> {
            let mut layer = Sequential::new();
            for number in 0..count {
                let stride = if number == 0 { stride } else { 1 };
                match kind {
                    Kind::Basic => layer.push(BasicBlock::new(channels, planes, stride)?),
                    Kind::Bottleneck => layer.push(Bottleneck::new(channels, planes, stride)?),
                }
                channels = planes * kind.expansion();
            }
            Ok(layer)
        };
        let resnet = Self {
            conv1,
            bn1,
            maxpool: MaxPool2d::new(3).stride(2).padding(1),
            layer1: layer(64, blocks[0], 1)?,
            layer2: layer(128, blocks[1], 2)?,
            layer3: layer(256, blocks[2], 2)?,
            layer4: layer(512, blocks[3], 2)?,
            avgpool: AdaptiveAvgPool2d::new(1),
            fc: Linear::new(512 * kind.expansion(), num_classes)?,
        };
        for (_, module) in resnet.named_modules() {
            if let Some(conv) = module.downcast_ref::<Conv2d>() {
                init::kaiming_normal_(&conv.weight, 0.0, Fan::Out, Nonlinearity::Relu)?;
            }
        }
        Ok(resnet)
    }

    /// # Shapes
    /// `[batch, 3, height, width]` to `[batch, 1000]`.
    ///
    /// # Errors
    /// When the input has another shape, dtype or device.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor, NnError> {
        let x = self.bn1.forward(&self.conv1.forward(x)?)?.f_relu_()?;
        let x = self.maxpool.forward(&x)?;
        let x = self.layer2.forward(&self.layer1.forward(&x)?)?;
        let x = self.layer4.forward(&self.layer3.forward(&x)?)?;
        self.fc.forward(&Flatten::new().forward(&self.avgpool.forward(&x)?)?)
    }
}

/// The projection of a block whose output has another size than its input.
fn downsample(inputs: i64, outputs: i64, stride: i64) -> Result<Option<Sequential>, NnError> {
    if stride == 1 && inputs == outputs {
        return Ok(None);
    }
    let conv = Conv2d::builder(inputs, outputs, 1).stride(stride).bias(false).build()?;
    Ok(Some(Sequential::new().add(conv).add(BatchNorm2d::new(outputs)?)))
}

fn conv3x3(inputs: i64, outputs: i64, stride: i64) -> Result<Conv2d, NnError> {
    Conv2d::builder(inputs, outputs, 3).stride(stride).padding(1).bias(false).build()
}

/// What a block adds its input to.
fn add(out: Tensor, x: &Tensor, downsample: &Option<Sequential>) -> Result<Tensor, NnError> {
    let mut out = match downsample {
        Some(downsample) => out + downsample.forward(x)?,
        None => out + x,
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
        // torchvision draws the projection first.
        let downsample = downsample(inputs, planes, stride)?;
        let (conv1, bn1) = (conv3x3(inputs, planes, stride)?, BatchNorm2d::new(planes)?);
        let (conv2, bn2) = (conv3x3(planes, planes, 1)?, BatchNorm2d::new(planes)?);
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
        let one = |inputs, outputs| Conv2d::builder(inputs, outputs, 1).bias(false).build();
        let (conv1, bn1) = (one(inputs, planes)?, BatchNorm2d::new(planes)?);
        let (conv2, bn2) = (conv3x3(planes, planes, stride)?, BatchNorm2d::new(planes)?);
        let (conv3, bn3) = (one(planes, 4 * planes)?, BatchNorm2d::new(4 * planes)?);
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
