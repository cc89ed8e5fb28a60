//! The models that benches and parity cases train.

use tch::nn::{self, Module, Path};
use tch::{Kind, Tensor};

/// A small CNN for 28x28 grey images: two convolutions with pooling, two linear layers, 105,866 parameters.
#[derive(Debug)]
pub struct Cnn {
    conv1: nn::Conv2D,
    conv2: nn::Conv2D,
    fc1: nn::Linear,
    fc2: nn::Linear,
}

impl Cnn {
    /// The model, with tch's initial weights.
    pub fn new(vs: &Path<'_>) -> Self {
        let padded = nn::ConvConfig { padding: 1, ..Default::default() };
        Self {
            conv1: nn::conv2d(vs / "conv1", 1, 16, 3, padded),
            conv2: nn::conv2d(vs / "conv2", 16, 32, 3, padded),
            fc1: nn::linear(vs / "fc1", 32 * 7 * 7, 64, Default::default()),
            fc2: nn::linear(vs / "fc2", 64, 10, Default::default()),
        }
    }

    /// Ten logits an image.
    ///
    /// # Shapes
    /// `[N, 1, 28, 28]` to `[N, 10]`.
    pub fn forward(&self, images: &Tensor) -> Tensor {
        let x = self.conv1.forward(images).relu().max_pool2d_default(2);
        let x = self.conv2.forward(&x).relu().max_pool2d_default(2);
        let x = self.fc1.forward(&x.flatten(1, -1)).relu();
        self.fc2.forward(&x)
    }
}

/// The cross-entropy of logits against class numbers, the mean over the batch.
///
/// # Shapes
/// `[N, C]` and `[N]` to one number.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Tensor {
    logits.cross_entropy_loss::<Tensor>(targets, None, tch::Reduction::Mean, -100, 0.0)
}

/// How many of a batch's logits are largest at the target.
pub fn count_correct(logits: &Tensor, targets: &Tensor) -> Tensor {
    logits.argmax(-1, false).eq_tensor(targets).sum(Kind::Int64)
}

/// A perceptron of linear layers with ReLU between them: 784-128-128-10 in the step-time comparison.
#[derive(Debug)]
pub struct Mlp {
    layers: Vec<nn::Linear>,
}

impl Mlp {
    /// Layers from each width to the next.
    pub fn new(vs: &Path<'_>, widths: &[i64]) -> Self {
        let layers = widths.windows(2).enumerate();
        let linear = |(index, pair): (usize, &[i64])| nn::linear(vs / index, pair[0], pair[1], Default::default());
        Self { layers: layers.map(linear).collect() }
    }

    /// # Shapes
    /// `[N, widths[0]]` to `[N, widths[last]]`.
    pub fn forward(&self, inputs: &Tensor) -> Tensor {
        let (last, hidden) = match self.layers.split_last() {
            Some(split) => split,
            None => return inputs.shallow_clone(),
        };
        let x = hidden.iter().fold(inputs.shallow_clone(), |x, layer| layer.forward(&x).relu());
        last.forward(&x)
    }
}
