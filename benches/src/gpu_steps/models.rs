//! The models, the same as in `peers/gpu_counts.py`, and their batches.

use anyhow::Result;
use overdrive::nn::{Forward, NnError};
use overdrive::prelude::*;

const WIDTH: i64 = 64;
const HEADS: i64 = 4;
const LENGTH: i64 = 32;
const VOCABULARY: i64 = 96;
pub const CLASSES: i64 = 10;

/// Inputs and targets on the host.
pub type Batch = (Tensor, Tensor);

pub fn mlp() -> Result<nn::Sequential> {
    Ok(sequential![
        nn::Linear::new(256, 512)?,
        nn::Relu,
        nn::Linear::new(512, 512)?,
        nn::Relu,
        nn::Linear::new(512, CLASSES)?
    ])
}

pub fn cnn() -> Result<nn::Sequential> {
    Ok(sequential![
        nn::Conv2d::builder(3, 16, 3).padding(1).bias(false).build()?,
        nn::BatchNorm2d::new(16)?,
        nn::Relu,
        nn::MaxPool2d::new(2),
        nn::Conv2d::builder(16, 32, 3).padding(1).build()?,
        nn::Relu,
        nn::AdaptiveAvgPool2d::new(1),
        nn::Flatten::new(),
        nn::Linear::new(32, CLASSES)?
    ])
}

/// The batch of a model by its name.
pub fn batch(model: &str) -> Batch {
    match model {
        "mlp" => (normal(&[64, 256]), whole(CLASSES, &[64])),
        "cnn" => (normal(&[16, 3, 32, 32]), whole(CLASSES, &[16])),
        _ => (whole(VOCABULARY, &[4, LENGTH]), whole(VOCABULARY, &[4 * LENGTH])),
    }
}

fn normal(size: &[i64]) -> Tensor {
    Tensor::randn(size, (Kind::Float, Device::Cpu))
}

fn whole(below: i64, size: &[i64]) -> Tensor {
    Tensor::randint(below, size, (Kind::Int64, Device::Cpu))
}

#[derive(Module)]
struct Block {
    norm1: nn::LayerNorm,
    attention: nn::Linear,
    project: nn::Linear,
    norm2: nn::LayerNorm,
    widen: nn::Linear,
    narrow: nn::Linear,
}

impl Block {
    fn new() -> Result<Self> {
        Ok(Self {
            norm1: nn::LayerNorm::new(WIDTH)?,
            attention: nn::Linear::new(WIDTH, 3 * WIDTH)?,
            project: nn::Linear::new(WIDTH, WIDTH)?,
            norm2: nn::LayerNorm::new(WIDTH)?,
            widen: nn::Linear::new(WIDTH, 4 * WIDTH)?,
            narrow: nn::Linear::new(4 * WIDTH, WIDTH)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor, NnError> {
        let all = self.attention.forward(&self.norm1.forward(x)?)?.chunk(3, -1);
        let heads = |part: &Tensor| part.view([-1, LENGTH, HEADS, WIDTH / HEADS]).transpose(1, 2);
        let (q, k, v) = (heads(&all[0]), heads(&all[1]), heads(&all[2]));
        let mixed = Tensor::scaled_dot_product_attention(&q, &k, &v, None::<&Tensor>, 0.0, true, None, false);
        let x = x + self.project.forward(&mixed.transpose(1, 2).reshape([-1, LENGTH, WIDTH]))?;
        let wide = self.widen.forward(&self.norm2.forward(&x)?)?.gelu("none");
        Ok(x + self.narrow.forward(&wide)?)
    }
}

#[derive(Module)]
pub struct Gpt {
    tokens: nn::Embedding,
    places: nn::Embedding,
    blocks: nn::ModuleList<Block>,
    norm: nn::LayerNorm,
    head: nn::Linear,
}

impl Gpt {
    pub fn new() -> Result<Self> {
        Ok(Self {
            tokens: nn::Embedding::new(VOCABULARY, WIDTH)?,
            places: nn::Embedding::new(LENGTH, WIDTH)?,
            blocks: [Block::new()?, Block::new()?].into_iter().collect(),
            norm: nn::LayerNorm::new(WIDTH)?,
            head: nn::Linear::builder(WIDTH, VOCABULARY).bias(false).build()?,
        })
    }
}

impl Forward for Gpt {
    fn forward(&self, input: &Tensor) -> Result<Tensor, NnError> {
        let places = Tensor::arange(LENGTH, (Kind::Int64, input.device()));
        let mut x = self.tokens.forward(input)? + self.places.forward(&places)?;
        for block in self.blocks.iter() {
            x = block.forward(&x)?;
        }
        Ok(self.head.forward(&self.norm.forward(&x)?)?.flatten(0, 1))
    }
}
