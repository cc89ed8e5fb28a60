//! The models, the same as in `peers/gpu_counts.py`, and their batches.

use anyhow::Result;
use overdrive::nn::{Forward, NnError};
use overdrive::prelude::*;

use super::Recipe;
use crate::gpt;

pub const CLASSES: i64 = 10;

/// Inputs and targets on the host.
pub type Batch = (Tensor, Tensor);

/// Small, because the host multiplies matrices of bfloat16 slowly, as Muon does 15 times a step for each of them.
pub fn mlp() -> Result<nn::Sequential> {
    Ok(sequential![
        nn::Linear::new(64, 128)?,
        nn::Relu,
        nn::Linear::new(128, 128)?,
        nn::Relu,
        nn::Linear::new(128, CLASSES)?
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

/// The next token by the last one alone, with sparse gradients.
#[derive(Module)]
pub struct Lookup {
    table: nn::Embedding,
}

impl Lookup {
    pub fn new() -> Result<Self> {
        Ok(Self { table: nn::Embedding::builder(gpt::VOCABULARY, gpt::VOCABULARY).sparse(true).build()? })
    }
}

impl Forward for Lookup {
    fn forward(&self, tokens: &Tensor) -> Result<Tensor, NnError> {
        self.table.forward(&tokens.flatten(0, -1))
    }
}

/// The batch of a step.
pub fn batch(recipe: &Recipe) -> Batch {
    match (recipe.model, recipe.upload) {
        ("mlp", _) => (normal(&[64, 64]), whole(CLASSES, &[64])),
        ("cnn", false) => (normal(&[16, 3, 32, 32]), whole(CLASSES, &[16])),
        ("cnn", true) => (whole(256, &[16, 3, 32, 32]).to_kind(Kind::Uint8), whole(CLASSES, &[16])),
        _ => gpt::batch(),
    }
}

fn normal(size: &[i64]) -> Tensor {
    Tensor::randn(size, (Kind::Float, Device::Cpu))
}

fn whole(below: i64, size: &[i64]) -> Tensor {
    Tensor::randint(below, size, (Kind::Int64, Device::Cpu))
}
