//! nanoGPT's `train.py` on the shipped play: groups, a cosine, clipping, accumulation, data-parallel ranks and resume.
//!
//! Its losses are those of `parity/recipes/nanogpt.py`, to the bit, alone and with two ranks under
//! `overdrive-run --nproc-per-node 2`: `cargo xtask parity recipes`. Run again with the same `OUT_DIR`, it goes on from
//! its last checkpoint as if it had never stopped: unlike the original, a batch is drawn when it is used and not one ahead,
//! and the checkpoint is written before the evaluation draws its batches.
//!
//!     cargo run -p overdrive-examples --example recipe_nanogpt
#![forbid(unsafe_code)]

use std::f64::consts::PI;

use anyhow::Result;
use overdrive::checkpoint::Writers;
use overdrive::ddp::{Backend, InitMethod};
use overdrive::nn::init;
use overdrive::prelude::*;

// Model

struct GptConfig {
    block_size: i64,
    vocab_size: i64,
    n_layer: i64,
    n_head: i64,
    n_embd: i64,
    dropout: f64,
    bias: bool,
}

impl Default for GptConfig {
    fn default() -> Self {
        Self { block_size: 64, vocab_size: 128, n_layer: 3, n_head: 4, n_embd: 96, dropout: 0.1, bias: false }
    }
}

fn linear(inputs: i64, outputs: i64, bias: bool) -> Result<nn::Linear> {
    Ok(nn::Linear::builder(inputs, outputs).bias(bias).build()?)
}

fn layer_norm(config: &GptConfig) -> Result<nn::LayerNorm> {
    Ok(nn::LayerNorm::builder(config.n_embd).bias(config.bias).build()?)
}

#[derive(Module)]
struct CausalSelfAttention {
    c_attn: nn::Linear,
    c_proj: nn::Linear,
    resid_dropout: nn::Dropout,
    state: nn::ModuleState,
    n_head: i64,
    dropout: f64,
}

impl CausalSelfAttention {
    fn new(config: &GptConfig) -> Result<Self> {
        Ok(Self {
            c_attn: linear(config.n_embd, 3 * config.n_embd, config.bias)?,
            c_proj: linear(config.n_embd, config.n_embd, config.bias)?,
            resid_dropout: nn::Dropout::new(config.dropout)?,
            state: nn::ModuleState::default(),
            n_head: config.n_head,
            dropout: config.dropout,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (b, t, c) = x.size3()?;
        let qkv = self.c_attn.forward(x)?.split(c, 2);
        let [q, k, v] = [0, 1, 2].map(|part| qkv[part].view([b, t, self.n_head, c / self.n_head]).transpose(1, 2));
        let dropout = if self.state.is_training() { self.dropout } else { 0.0 };
        let y = Tensor::scaled_dot_product_attention(&q, &k, &v, None::<&Tensor>, dropout, true, None, false);
        let y = y.transpose(1, 2).contiguous().view([b, t, c]);
        Ok(self.resid_dropout.forward(&self.c_proj.forward(&y)?)?)
    }
}

#[derive(Module)]
struct Mlp {
    c_fc: nn::Linear,
    gelu: nn::Gelu,
    c_proj: nn::Linear,
    dropout: nn::Dropout,
}

impl Mlp {
    fn new(config: &GptConfig) -> Result<Self> {
        Ok(Self {
            c_fc: linear(config.n_embd, 4 * config.n_embd, config.bias)?,
            gelu: nn::Gelu,
            c_proj: linear(4 * config.n_embd, config.n_embd, config.bias)?,
            dropout: nn::Dropout::new(config.dropout)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.gelu.forward(&self.c_fc.forward(x)?)?;
        Ok(self.dropout.forward(&self.c_proj.forward(&x)?)?)
    }
}

#[derive(Module)]
struct Block {
    ln_1: nn::LayerNorm,
    attn: CausalSelfAttention,
    ln_2: nn::LayerNorm,
    mlp: Mlp,
}

impl Block {
    fn new(config: &GptConfig) -> Result<Self> {
        Ok(Self {
            ln_1: layer_norm(config)?,
            attn: CausalSelfAttention::new(config)?,
            ln_2: layer_norm(config)?,
            mlp: Mlp::new(config)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = x + self.attn.forward(&self.ln_1.forward(x)?)?;
        Ok(&x + self.mlp.forward(&self.ln_2.forward(&x)?)?)
    }
}

#[derive(Module)]
struct Gpt {
    wte: nn::Embedding,
    wpe: nn::Embedding,
    drop: nn::Dropout,
    h: nn::ModuleList<Block>,
    ln_f: nn::LayerNorm,
    lm_head: nn::Linear,
}

impl Gpt {
    fn new(config: &GptConfig) -> Result<Self> {
        let mut gpt = Self {
            wte: nn::Embedding::new(config.vocab_size, config.n_embd)?,
            wpe: nn::Embedding::new(config.block_size, config.n_embd)?,
            drop: nn::Dropout::new(config.dropout)?,
            h: (0..config.n_layer).map(|_| Block::new(config)).collect::<Result<_>>()?,
            ln_f: layer_norm(config)?,
            lm_head: linear(config.n_embd, config.vocab_size, false)?,
        };
        gpt.wte.weight = gpt.lm_head.weight.tie();
        gpt.apply(init_weights)?;
        for parameter in gpt.named_parameters() {
            if parameter.name().is_some_and(|name| name.ends_with("c_proj.weight")) {
                init::normal_(parameter.tensor(), 0.0, 0.02 / (2.0 * config.n_layer as f64).sqrt())?;
            }
        }
        Ok(gpt)
    }

    fn forward(&self, idx: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let pos = Tensor::arange(idx.size()[1], (Kind::Int64, idx.device()));
        let mut x = self.drop.forward(&(self.wte.forward(idx)? + self.wpe.forward(&pos)?))?;
        for block in self.h.iter() {
            x = block.forward(&x)?;
        }
        let logits = self.lm_head.forward(&self.ln_f.forward(&x)?)?;
        Ok(logits.view([-1, logits.size()[2]]).cross_entropy_for_logits(&targets.view(-1)))
    }
}

fn init_weights(module: &dyn Module) -> Result<()> {
    if let Some(linear) = module.downcast_ref::<nn::Linear>() {
        init::normal_(&linear.weight, 0.0, 0.02)?;
    } else if let Some(embedding) = module.downcast_ref::<nn::Embedding>() {
        init::normal_(&embedding.weight, 0.0, 0.02)?;
    }
    Ok(())
}

// Data

fn hamlet() -> (Tensor, Tensor) {
    let text = include_str!("../../data/text/hamlet.txt");
    let data = Tensor::from_slice(&text.chars().map(|c| i64::from(u32::from(c).min(127))).collect::<Vec<_>>());
    let train = data.size()[0] * 9 / 10;
    (data.narrow(0, 0, train), data.narrow(0, train, data.size()[0] - train))
}

fn get_batch(data: &Tensor, config: &GptConfig, device: Device) -> Result<(Tensor, Tensor)> {
    let ix = Tensor::randint(data.size()[0] - config.block_size, [BATCH_SIZE], (Kind::Int64, Device::Cpu));
    let ix = Vec::<i64>::try_from(ix)?;
    let rows = |shift| {
        let row = |i: &i64| data.narrow(0, i + shift, config.block_size);
        Tensor::stack(&ix.iter().map(row).collect::<Vec<_>>(), 0).to_device(device)
    };
    Ok((rows(0), rows(1)))
}

// Training

const EVAL_INTERVAL: u64 = 25;
const EVAL_ITERS: usize = 4;
const BATCH_SIZE: i64 = 8;
const GRADIENT_ACCUMULATION_STEPS: usize = 4;
const LEARNING_RATE: f64 = 1e-3;
const MIN_LR: f64 = 1e-4;
const MAX_ITERS: u64 = 50;
const LR_DECAY_ITERS: u64 = 50;
const WARMUP_ITERS: u64 = 5;
const WEIGHT_DECAY: f64 = 1e-1;
const BETAS: (f64, f64) = (0.9, 0.95);
const GRAD_CLIP: f64 = 1.0;

fn get_lr(it: u64) -> f64 {
    if it < WARMUP_ITERS {
        return LEARNING_RATE * (it + 1) as f64 / (WARMUP_ITERS + 1) as f64;
    }
    if it > LR_DECAY_ITERS {
        return MIN_LR;
    }
    let decay_ratio = (it - WARMUP_ITERS) as f64 / (LR_DECAY_ITERS - WARMUP_ITERS) as f64;
    let coeff = 0.5 * (1.0 + (PI * decay_ratio).cos());
    MIN_LR + coeff * (LEARNING_RATE - MIN_LR)
}

fn estimate_loss(model: &Gpt, data: &Tensor, config: &GptConfig, device: Device) -> Result<f64> {
    let _no_grad = tch::no_grad_guard();
    model.eval();
    let mut loss = 0.0;
    for _ in 0..EVAL_ITERS {
        let (x, y) = get_batch(data, config, device)?;
        loss += model.forward(&x, &y)?.double_value(&[]);
    }
    model.train();
    Ok(loss / EVAL_ITERS as f64)
}

fn main() -> Result<()> {
    let launched = std::env::var_os("RANK").is_some();
    let group = launched.then(|| init_process_group(Backend::Gloo, InitMethod::Auto)).transpose()?;
    let (rank, world_size) = group.as_ref().map_or((0, 1), |group| (group.rank(), group.size()));
    let accumulation = GRADIENT_ACCUMULATION_STEPS / world_size;
    let device = Device::cuda_if_available();
    tch::manual_seed(1337 + rank as i64);
    let (train_data, val_data) = hamlet();

    let config = GptConfig::default();
    let mut model = Gpt::new(&config)?;
    model.to(device)?;
    let adamw = AdamW::builder(&model).lr(LEARNING_RATE).betas(BETAS.0, BETAS.1).weight_decay(WEIGHT_DECAY);
    let mut optimizer = adamw.decay_groups().build()?;
    let mut rng = RngState::new(device);
    let folder = std::env::var("OUT_DIR").unwrap_or_else(|_| "target/nanogpt".to_owned());
    let mut checkpoint = Checkpoint::builder(folder).every(EVAL_INTERVAL);
    if let Some(group) = &group {
        checkpoint = checkpoint.ranks(group.clone(), Writers::Each);
    }
    let mut checkpoint = checkpoint.build()?;
    let resumed = checkpoint.resume(&mut [("model", &mut model), ("optimizer", &mut optimizer), ("rng", &mut rng)])?;
    let ddp = group.as_ref().map(|group| DistributedDataParallel::new(&model, group)).transpose()?;

    for iter_num in resumed.map_or(0, |resumed| resumed.step)..MAX_ITERS {
        let lr = get_lr(iter_num);
        for group in 0..optimizer.num_groups() {
            optimizer.set_lr(group, lr)?;
        }
        if iter_num > 0 && checkpoint.due(iter_num)? {
            checkpoint.save(iter_num, &[("model", &model), ("optimizer", &optimizer), ("rng", &rng)])?;
        }
        if iter_num % EVAL_INTERVAL == 0 && rank == 0 {
            let train = estimate_loss(&model, &train_data, &config, device)?;
            let val = estimate_loss(&model, &val_data, &config, device)?;
            println!("step {iter_num}: train loss {train}, val loss {val}");
        }
        let mut loss = Tensor::new();
        for micro_step in 0..accumulation {
            let holding_back = ddp.as_ref().filter(|_| micro_step < accumulation - 1);
            let _no_sync = holding_back.map(DistributedDataParallel::no_sync);
            let (x, y) = get_batch(&train_data, &config, device)?;
            loss = match &ddp {
                Some(ddp) => ddp.forward(|| model.forward(&x, &y))??,
                None => model.forward(&x, &y)?,
            } / accumulation as f64;
            match &ddp {
                Some(ddp) => ddp.backward(&loss)?,
                None => loss.backward(),
            }
        }
        clip_grad_norm_(&model, GRAD_CLIP)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        if rank == 0 {
            println!("iter {iter_num}: loss {}, lr {lr:.2e}", loss.double_value(&[]) * accumulation as f64);
        }
    }
    Ok(checkpoint.finish()?)
}
