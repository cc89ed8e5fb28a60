//! A small GPT, the same as in `peers/gpu_counts.py` and `peers/compile.py`, and its batch.

use std::sync::Arc;

use anyhow::Result;
use overdrive::memory::{ActivationCheckpoint, Policy};
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

/// Attention of several heads from `[batch, length, 3 * width]`.
pub fn attend(all: &Tensor) -> Tensor {
    let (length, width) = (all.size()[1], all.size()[2] / 3);
    let all = all.chunk(3, -1);
    let heads = |part: &Tensor| part.view([-1, length, HEADS, width / HEADS]).transpose(1, 2);
    let (q, k, v) = (heads(&all[0]), heads(&all[1]), heads(&all[2]));
    let mixed = Tensor::scaled_dot_product_attention(&q, &k, &v, None::<&Tensor>, 0.0, true, None, false);
    mixed.transpose(1, 2).reshape([-1, length, width])
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
    fn new(width: i64) -> Result<Self> {
        Ok(Self {
            norm1: nn::LayerNorm::new(width)?,
            attention: nn::Linear::new(width, 3 * width)?,
            project: nn::Linear::new(width, width)?,
            norm2: nn::LayerNorm::new(width)?,
            widen: nn::Linear::new(width, 4 * width)?,
            narrow: nn::Linear::new(4 * width, width)?,
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
    blocks: nn::ModuleList<Arc<Block>>,
    norm: nn::LayerNorm,
    head: nn::Linear,
    /// How blocks are checkpointed, if they are.
    #[module(skip)]
    pub checkpoint: Option<Policy>,
}

impl Gpt {
    pub fn new() -> Result<Self> {
        Self::sized(BLOCKS, WIDTH, LENGTH)
    }

    /// With so many blocks of this width, for texts of this length.
    pub fn sized(blocks: usize, width: i64, length: i64) -> Result<Self> {
        Ok(Self {
            tokens: nn::Embedding::new(VOCABULARY, width)?,
            places: nn::Embedding::new(length, width)?,
            blocks: (0..blocks).map(|_| Block::new(width).map(Arc::new)).collect::<Result<_>>()?,
            norm: nn::LayerNorm::new(width)?,
            head: nn::Linear::builder(width, VOCABULARY).bias(false).build()?,
            checkpoint: None,
        })
    }
}

impl Forward for Gpt {
    fn forward(&self, input: &Tensor) -> Result<Tensor, NnError> {
        let places = Tensor::arange(input.size()[1], (Kind::Int64, input.device()));
        let mut x = self.tokens.forward(input)? + self.places.forward(&places)?;
        for block in self.blocks.iter() {
            x = match &self.checkpoint {
                None => block.forward(&x)?,
                Some(policy) => {
                    let block = Arc::clone(block);
                    ActivationCheckpoint::default().keep(policy.clone()).run(move |[x]| block.forward(x), [&x])?
                }
            };
        }
        Ok(self.head.forward(&self.norm.forward(&x)?)?.flatten(0, 1))
    }
}
