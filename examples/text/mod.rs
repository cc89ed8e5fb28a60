//! Shared by the text examples: Hamlet in pieces, and a small transformer.

use overdrive::dataload::{DataError, FnDataset};
use overdrive::nn::{NnError, init};
use overdrive::prelude::*;

const TEXT: &str = include_str!("../../data/text/hamlet.txt");
const VOCABULARY: i64 = 128;
pub const CONTEXT: i64 = 64;
const WIDTH: i64 = 96;
const HEADS: i64 = 4;

/// The text in pieces of `CONTEXT` bytes plus the next byte; each piece starts half a context after the previous one.
pub fn pieces() -> FnDataset<impl Fn(usize) -> Result<Tensor, DataError>> {
    let (bytes, stride) = (TEXT.as_bytes(), CONTEXT as usize / 2);
    let count = (bytes.len() - CONTEXT as usize - 1) / stride;
    FnDataset::new(count, move |index| Ok(Tensor::from_slice(&bytes[index * stride..][..=CONTEXT as usize])))
}

/// A decoder like GPT-2: norms before attention and MLP, and a head that shares the embedding's weights.
#[derive(Module)]
pub struct Decoder {
    bytes: nn::Embedding,
    places: nn::Embedding,
    blocks: nn::ModuleList<Block>,
    norm: nn::LayerNorm,
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

impl Decoder {
    pub fn new() -> Result<Self, NnError> {
        let decoder = Self {
            bytes: nn::Embedding::new(VOCABULARY, WIDTH)?,
            places: nn::Embedding::new(CONTEXT, WIDTH)?,
            blocks: (0..2).map(|_| Block::new()).collect::<Result<_, _>>()?,
            norm: nn::LayerNorm::new(WIDTH)?,
        };
        // As small as a head's weights should be.
        init::normal_(&decoder.bytes.weight, 0.0, 0.05)?;
        init::normal_(&decoder.places.weight, 0.0, 0.05)?;
        Ok(decoder)
    }

    /// Bytes `[batch, length]` to logits `[batch, length, 128]`.
    pub fn forward(&self, bytes: &Tensor) -> Result<Tensor, NnError> {
        let places = Tensor::arange(bytes.size()[1], (Kind::Int64, bytes.device()));
        let mut x = self.bytes.forward(bytes)? + self.places.forward(&places)?;
        for block in self.blocks.iter() {
            x = block.forward(&x)?;
        }
        Ok(self.norm.forward(&x)?.matmul(&self.bytes.weight.transpose(0, 1)))
    }

    /// Continues `start` byte by byte, sampled from the model's probabilities.
    pub fn write(&self, start: &str, count: usize, device: Device) -> Result<String, NnError> {
        let _no_grad = tch::no_grad_guard();
        let mut text = start.as_bytes().to_vec();
        for _ in 0..count {
            let context = &text[text.len().saturating_sub(CONTEXT as usize)..];
            let context = Tensor::from_slice(context).to_kind(Kind::Int64).to_device(device).unsqueeze(0);
            let last = self.forward(&context)?.select(1, -1) / 0.7;
            let byte = last.softmax(-1, Kind::Float).multinomial(1, false);
            text.push(u8::try_from(byte.int64_value(&[0, 0])).unwrap_or(b' '));
        }
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}

impl Block {
    fn new() -> Result<Self, NnError> {
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
        let (batch, length, _) = x.size3()?;
        // [batch, length, 3 * WIDTH] to three of [batch, HEADS, length, WIDTH / HEADS].
        let all = self.attention.forward(&self.norm1.forward(x)?)?.split(WIDTH, 2);
        let [q, k, v] = [0, 1, 2].map(|part| all[part].view([batch, length, HEADS, -1]).transpose(1, 2));
        let heads = Tensor::scaled_dot_product_attention(&q, &k, &v, None::<&Tensor>, 0.0, true, None, false);
        let x = x + self.project.forward(&heads.transpose(1, 2).reshape([batch, length, WIDTH]))?;
        Ok(&x + self.narrow.forward(&self.widen.forward(&self.norm2.forward(&x)?)?.gelu("none"))?)
    }
}
