//! Shared by the text examples: Hamlet in pieces, and a small transformer.

use overdrive::dataload::{DataError, FnDataset};
use overdrive::prelude::*;
use tch::nn::{self, Module};

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
pub struct Decoder {
    bytes: nn::Embedding,
    places: nn::Embedding,
    blocks: Vec<Block>,
    norm: nn::LayerNorm,
}

struct Block {
    norms: [nn::LayerNorm; 2],
    attention: nn::Linear,
    project: nn::Linear,
    widen: nn::Linear,
    narrow: nn::Linear,
}

impl Decoder {
    pub fn new(vs: &nn::Path<'_>) -> Self {
        let init = nn::Init::Randn { mean: 0.0, stdev: 0.05 };
        let config = nn::EmbeddingConfig { ws_init: init, ..Default::default() };
        Self {
            bytes: nn::embedding(vs / "bytes", VOCABULARY, WIDTH, config),
            places: nn::embedding(vs / "places", CONTEXT, WIDTH, config),
            blocks: (0..2).map(|block| Block::new(&(vs / format!("block{block}")))).collect(),
            norm: nn::layer_norm(vs / "norm", vec![WIDTH], Default::default()),
        }
    }

    /// Bytes `[batch, length]` to logits `[batch, length, 128]`.
    pub fn forward(&self, bytes: &Tensor) -> Tensor {
        let places = Tensor::arange(bytes.size()[1], (Kind::Int64, bytes.device()));
        let mut x = self.bytes.forward(bytes) + self.places.forward(&places);
        for block in &self.blocks {
            x = block.forward(&x);
        }
        self.norm.forward(&x).matmul(&self.bytes.ws.transpose(0, 1))
    }

    /// Continues `start` byte by byte, sampled from the model's probabilities.
    pub fn write(&self, start: &str, count: usize, device: Device) -> String {
        let _no_grad = tch::no_grad_guard();
        let mut text = start.as_bytes().to_vec();
        for _ in 0..count {
            let context = &text[text.len().saturating_sub(CONTEXT as usize)..];
            let context = Tensor::from_slice(context).to_kind(Kind::Int64).to_device(device).unsqueeze(0);
            let last = self.forward(&context).select(1, -1) / 0.7;
            let byte = last.softmax(-1, Kind::Float).multinomial(1, false);
            text.push(u8::try_from(byte.int64_value(&[0, 0])).unwrap_or(b' '));
        }
        String::from_utf8_lossy(&text).into_owned()
    }
}

impl Block {
    fn new(vs: &nn::Path<'_>) -> Self {
        let linear = |name, inputs, outputs| nn::linear(vs / name, inputs, outputs, Default::default());
        Self {
            norms: ["norm1", "norm2"].map(|name| nn::layer_norm(vs / name, vec![WIDTH], Default::default())),
            attention: linear("attention", WIDTH, 3 * WIDTH),
            project: linear("project", WIDTH, WIDTH),
            widen: linear("widen", WIDTH, 4 * WIDTH),
            narrow: linear("narrow", 4 * WIDTH, WIDTH),
        }
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        let (batch, length, _) = x.size3().unwrap_or_default();
        // [batch, length, 3 * WIDTH] to three of [batch, HEADS, length, WIDTH / HEADS].
        let all =
            self.attention.forward(&self.norms[0].forward(x)).view([batch, length, 3 * HEADS, -1]).transpose(1, 2);
        let [q, k, v] = [0, 1, 2].map(|part| all.narrow(1, part * HEADS, HEADS));
        let heads = Tensor::scaled_dot_product_attention(&q, &k, &v, None::<&Tensor>, 0.0, true, None, false);
        let x = x + self.project.forward(&heads.transpose(1, 2).reshape([batch, length, WIDTH]));
        &x + self.narrow.forward(&self.widen.forward(&self.norms[1].forward(&x)).gelu("none"))
    }
}
