//! A small GPT, the same as in `peers/gpu_counts.py`, and its batch.

use anyhow::Result;
use overdrive::nn::{Forward, NnError};
use overdrive::prelude::*;

pub const WIDTH: i64 = 64;
pub const LENGTH: i64 = 32;
pub const VOCABULARY: i64 = 96;
pub const BLOCKS: usize = 2;
const HEADS: i64 = 4;

/// Tokens `[4, LENGTH]` and the flat targets, on the host.
pub fn batch() -> (Tensor, Tensor) {
    let tokens = |size: &[i64]| Tensor::randint(VOCABULARY, size, (Kind::Int64, Device::Cpu));
    (tokens(&[4, LENGTH]), tokens(&[4 * LENGTH]))
}

/// Attention of several heads from `[batch, LENGTH, 3 * WIDTH]`.
pub fn attend(all: &Tensor) -> Tensor {
    let all = all.chunk(3, -1);
    let heads = |part: &Tensor| part.view([-1, LENGTH, HEADS, WIDTH / HEADS]).transpose(1, 2);
    let (q, k, v) = (heads(&all[0]), heads(&all[1]), heads(&all[2]));
    let mixed = Tensor::scaled_dot_product_attention(&q, &k, &v, None::<&Tensor>, 0.0, true, None, false);
    mixed.transpose(1, 2).reshape([-1, LENGTH, WIDTH])
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
        let x = x + self.project.forward(&attend(&self.attention.forward(&self.norm1.forward(x)?)?))?;
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
            blocks: (0..BLOCKS).map(|_| Block::new()).collect::<Result<_>>()?,
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
