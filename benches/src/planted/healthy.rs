//! Loops without a bottleneck: they are limited by arithmetic or by memory bandwidth alone.

use anyhow::Result;
use overdrive::prelude::*;
use overdrive_profile::{Phase, RunProfile};
use tch::nn::{self, Embedding, LayerNorm, Linear, Module, Path, VarStore};

use super::training::{Trainer, batch, start_timer};
use super::{Form, Plan};
use crate::model::{Cnn, cross_entropy};

/// An MLP with large layers.
pub fn mlp(_: Form, plan: &Plan) -> Result<RunProfile> {
    let trainer = Trainer::mlp(Device::Cpu, &[784, 1024, 1024, 10])?;
    train(trainer, plan, batch(64, &[784]))
}

/// A small CNN.
pub fn cnn(_: Form, plan: &Plan) -> Result<RunProfile> {
    let vs = VarStore::new(Device::Cpu);
    let cnn = Cnn::new(&vs.root());
    train(Trainer::new(&vs, move |images| cnn.forward(images))?, plan, batch(16, &[1, 28, 28]))
}

fn train(mut trainer: Trainer, plan: &Plan, (inputs, targets): (Tensor, Tensor)) -> Result<RunProfile> {
    let timer = start_timer(plan, Device::Cpu)?;
    for _ in 0..plan.all_steps() {
        trainer.step(&timer, &inputs, &targets)?;
    }
    Ok(timer.finish()?)
}

const TEXTS: i64 = 4;
const LENGTH: i64 = 64;
const WIDTH: i64 = 128;
const HEADS: i64 = 4;
/// Tokens are bytes.
const TOKENS: i64 = 256;

/// A language model over bytes: four transformer blocks (attention and an MLP) with about fifty parameter tensors.
pub fn transformer(_: Form, plan: &Plan) -> Result<RunProfile> {
    let vs = VarStore::new(Device::Cpu);
    let root = vs.root();
    let embedding: Embedding = nn::embedding(&root / "embedding", TOKENS, WIDTH, Default::default());
    let positions = (&root / "positions").randn("weight", &[LENGTH, WIDTH], 0.0, 0.02);
    let blocks: Vec<Block> = (0..4).map(|number| Block::new(&(&root / format!("block{number}")))).collect();
    let head = nn::linear(&root / "head", WIDTH, TOKENS, Default::default());
    let mut trainer = Trainer::new(&vs, move |tokens| {
        let x = embedding.forward(tokens) + &positions;
        head.forward(&blocks.iter().fold(x, |x, block| block.forward(&x))).view([-1, TOKENS])
    })?;
    let text = Tensor::randint(TOKENS, [TEXTS, LENGTH + 1], (Kind::Int64, Device::Cpu));
    let (inputs, next) = (text.narrow(1, 0, LENGTH), text.narrow(1, 1, LENGTH).reshape([-1]));
    let timer = start_timer(plan, Device::Cpu)?;
    for _ in 0..plan.all_steps() {
        let loss = {
            let _phase = timer.phase(Phase::Forward);
            cross_entropy(&trainer.forward(&inputs), &next)
        };
        trainer.learn(&timer, &loss)?;
        timer.count_tokens((TEXTS * LENGTH) as u64);
        timer.step(TEXTS as u64);
    }
    Ok(timer.finish()?)
}

struct Block {
    norms: [LayerNorm; 2],
    query_key_value: Linear,
    out: Linear,
    wide: Linear,
    narrow: Linear,
}

impl Block {
    fn new(vs: &Path<'_>) -> Self {
        let linear = |name: &str, from, to| nn::linear(vs / name, from, to, Default::default());
        Self {
            norms: ["norm1", "norm2"].map(|name| nn::layer_norm(vs / name, vec![WIDTH], Default::default())),
            query_key_value: linear("query_key_value", WIDTH, 3 * WIDTH),
            out: linear("out", WIDTH, WIDTH),
            wide: linear("wide", WIDTH, 4 * WIDTH),
            narrow: linear("narrow", 4 * WIDTH, WIDTH),
        }
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        let x = x + self.attention(&self.norms[0].forward(x));
        let wide = self.wide.forward(&self.norms[1].forward(&x)).gelu("none");
        &x + self.narrow.forward(&wide)
    }

    fn attention(&self, x: &Tensor) -> Tensor {
        let parts = self.query_key_value.forward(x).view([TEXTS, LENGTH, 3, HEADS, WIDTH / HEADS]);
        let parts = parts.permute([2, 0, 3, 1, 4]).unbind(0);
        let (query, key, value) = (&parts[0], &parts[1], &parts[2]);
        let seen =
            Tensor::scaled_dot_product_attention::<Tensor>(query, key, value, None, 0.0, true, None::<f64>, false);
        self.out.forward(&seen.transpose(1, 2).reshape([TEXTS, LENGTH, WIDTH]))
    }
}
