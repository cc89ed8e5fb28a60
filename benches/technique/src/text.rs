//! The text: a small GPT over the characters of a play.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use overdrive_dataload::DataError;
use tch::nn::Module;
use tch::{Device, Kind, Tensor, nn};

use super::job::Job;
use super::trainer::{Batches, Feed, Model};

/// The shape of a model.
pub struct Shape {
    /// Characters of a piece of text.
    pub context: i64,
    /// Numbers of a character's embedding.
    pub width: i64,
    heads: i64,
    /// Blocks of attention and perceptron.
    pub blocks: i64,
    /// At least the number of different characters.
    pub vocabulary: i64,
}

const SMALL: Shape = Shape { context: 128, width: 192, heads: 6, blocks: 4, vocabulary: 128 };
/// GPT-2's smallest, 124 million parameters.
const GPT2: Shape = Shape { context: 1024, width: 768, heads: 12, blocks: 12, vocabulary: 50304 };

/// The model's shape on a device.
pub fn shape(device: Device) -> &'static Shape {
    if device.is_cuda() { &GPT2 } else { &SMALL }
}

/// Input characters of a piece of text.
pub fn context(device: Device) -> i64 {
    shape(device).context
}

/// A decoder like GPT-2: layer norms before attention and MLP; the head shares the embedding's weights.
pub fn model(vs: &nn::Path<'_>, device: Device) -> Result<Model> {
    let shape = shape(device);
    let characters = nn::embedding(vs / "characters", shape.vocabulary, shape.width, Default::default());
    let places = nn::embedding(vs / "places", shape.context, shape.width, Default::default());
    let blocks: Vec<Block> = (0..shape.blocks).map(|block| Block::new(&(vs / "blocks" / block), shape)).collect();
    let norm = nn::layer_norm(vs / "norm", vec![shape.width], Default::default());
    Ok(Box::new(move |text, _| {
        let at = Tensor::arange(text.size()[1], (Kind::Int64, text.device()));
        let x = characters.forward(text) + places.forward(&at);
        let x = blocks.iter().fold(x, |x, block| block.forward(&x));
        norm.forward(&x).matmul(&characters.ws.transpose(0, 1))
    }))
}

struct Block {
    norms: [nn::LayerNorm; 2],
    attention: nn::Linear,
    project: nn::Linear,
    widen: nn::Linear,
    narrow: nn::Linear,
    heads: i64,
}

impl Block {
    fn new(vs: &nn::Path<'_>, shape: &Shape) -> Self {
        let linear = |name, inputs, outputs| nn::linear(vs / name, inputs, outputs, Default::default());
        let width = shape.width;
        Self {
            norms: ["norm1", "norm2"].map(|name| nn::layer_norm(vs / name, vec![width], Default::default())),
            attention: linear("attention", width, 3 * width),
            project: linear("project", width, width),
            widen: linear("widen", width, 4 * width),
            narrow: linear("narrow", 4 * width, width),
            heads: shape.heads,
        }
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        let (batch, length, width) = x.size3().unwrap_or_default();
        // [batch, length, 3 * width] to three of [batch, heads, length, width / heads]. `narrow` three times would fill a
        // gradient of the whole for each part.
        let all = self.attention.forward(&self.norms[0].forward(x)).split(width, 2);
        let [q, k, v] = [0, 1, 2].map(|part| all[part].view([batch, length, self.heads, -1]).transpose(1, 2));
        let heads = Tensor::scaled_dot_product_attention(&q, &k, &v, None::<&Tensor>, 0.0, true, None, false);
        let x = x + self.project.forward(&heads.transpose(1, 2).reshape([batch, length, width]));
        &x + self.narrow.forward(&self.widen.forward(&self.norms[1].forward(&x)).gelu("none"))
    }
}

/// Pieces of the text at random places, drawn from libtorch's generator as in `peers/text.py`: the same for a seed.
///
/// # Errors
/// When the text cannot be read.
pub fn feed(job: &Job, device: Device) -> Result<Box<dyn Feed>> {
    let batch_size = (job.batch_size / job.micro_batches()) as i64;
    let text = std::fs::read_to_string(&job.train).with_context(|| format!("cannot read {}", job.train.display()))?;
    let characters: BTreeSet<char> = text.chars().collect();
    let numbers: BTreeMap<char, i64> = characters.into_iter().zip(0..).collect();
    let text = Tensor::from_slice(&text.chars().map(|character| numbers[&character]).collect::<Vec<_>>());
    Ok(Box::new(Pieces { text, context: context(device), batch_size }))
}

struct Pieces {
    /// The numbers of all characters.
    text: Tensor,
    context: i64,
    batch_size: i64,
}

impl Feed for Pieces {
    fn epoch(&self, _: u64) -> Batches<'_> {
        let last = self.text.size()[0] - self.context;
        let batch = move |_| {
            let places = Tensor::f_randint(last, [self.batch_size], (Kind::Int64, Device::Cpu))?;
            let places = Vec::<i64>::try_from(&places)?;
            let pieces = |from: i64| {
                let pieces = places.iter().map(|at| self.text.f_narrow(0, at + from, self.context));
                Tensor::f_stack(&pieces.collect::<Result<Vec<_>, _>>()?, 0)
            };
            Ok((pieces(0)?, pieces(1)?))
        };
        let batches = last / self.batch_size;
        Box::new((0..batches).map(batch).map(|batch: Result<_, tch::TchError>| batch.map_err(DataError::Tensor)))
    }
}
