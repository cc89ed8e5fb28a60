//! Four ranks train a model whose parameters, gradients and optimizer state do not fit one rank's memory (ZeRO-3).
//!
//! The program starts itself four times (`spawn`). libtorch may give each rank 45 % of what training the model takes. A
//! plain loop runs out of memory under this limit. Sharded, each block is a unit: the model is made block by block, whole
//! parameters are there for the block that computes and the next one, and a rank keeps a quarter of everything else.
//!
//! Expect: the losses of the plain loop without a limit, a peak of memory below the limit, and a whole model that the
//! plain one loads, in less than a minute on a CPU.
//!
//!     cargo run -p overdrive-examples --example 21_fully_sharded
#![forbid(unsafe_code)]

use anyhow::{Context, Result, ensure};
use overdrive::core::{Optimizer, Stateful};
use overdrive::ddp::{Backend, InitMethod, ProcessGroup, ReduceOp, init_process_group, spawn};
use overdrive::ffi::host_memory;
use overdrive::memory::is_out_of_memory;
use overdrive::optim::AdamW;
use overdrive::shard::{FullyShardedDataParallel, ShardedUnit};
use overdrive::tch::nn::{self, Module};
use overdrive::tch::{self, Device, Kind, Tensor};

const RANKS: usize = 4;
const STEPS: usize = 15;
const BLOCKS: usize = 24;
const WIDTH: i64 = 192;
const SAMPLES: i64 = 8;
const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);
/// Parameters, gradients and AdamW's two averages.
const STATE_BYTES: usize = 4 * 4 * BLOCKS * (WIDTH * WIDTH + WIDTH) as usize;

fn main() -> Result<()> {
    Ok(spawn(RANKS, train)?)
}

fn train() -> Result<()> {
    let group = init_process_group(Backend::Gloo, InitMethod::Auto)?;
    let is_first = group.rank() == 0;
    host_memory::count(usize::MAX)?;
    let before = host_memory::stats()?.allocated as usize;

    // Without a limit, and with the batches of all ranks, for comparison.
    let expected = if is_first { plain()? } else { Vec::new() };

    let limit = STATE_BYTES * 45 / 100;
    host_memory::count(before + limit)?;
    if is_first {
        let told = plain().err().context("the plain loop fits the limit")?;
        ensure!(is_out_of_memory(&*told), "{told:#}");
        println!("plain: the state takes {:.1} MB, and out of memory with {:.1} MB", mb(STATE_BYTES), mb(limit));
    }

    host_memory::reset_peak()?;
    let (vs, model) = sharded(&group, &expected)?;
    let peak = host_memory::stats()?.peak as usize - before;
    let peaks = group.all_gather_object(&peak)?;
    ensure!(peaks.iter().all(|peak| *peak < limit), "{peaks:?} of {limit}");

    // The whole model, for a plain one to load: where there is memory for it.
    host_memory::count(usize::MAX)?;
    let whole = model.consolidate_state_dict(0)?;
    drop((vs, model));
    if let Some(whole) = whole {
        let (mut vs, _blocks) = blocks(2);
        vs.load_state_dict(&whole)?;
        let peaks = peaks.iter().map(|peak| format!("{:.1}", mb(*peak))).collect::<Vec<_>>().join(", ");
        println!("sharded: losses equal; ranks took {peaks} MB at most");
    }
    Ok(())
}

fn sharded(group: &ProcessGroup, expected: &[f64]) -> Result<(nn::VarStore, FullyShardedDataParallel)> {
    tch::manual_seed(1);
    let vs = nn::VarStore::new(Device::Cpu);
    let mut sharding = FullyShardedDataParallel::builder(group)?;
    let mut blocks: Vec<(nn::Linear, ShardedUnit)> = Vec::new();
    for number in 0..BLOCKS {
        let block = block(&vs, number);
        let bias = block.bs.as_ref().context("a bias")?;
        let unit = sharding.unit(&format!("blocks.{number}"), [("weight", &block.ws), ("bias", bias)])?;
        blocks.push((block, unit)); // its whole parameters are freed: there is room for the next block
    }
    let model = sharding.build(&vs)?;
    let mut opt = model.optimizer(|params| AdamW::builder(params).lr(1e-3).weight_decay(0.1).build())?;

    for step in 0..STEPS {
        let (inputs, targets) = batch(step, group.rank());
        let outputs = model.try_forward(inputs, |mut x| -> Result<Tensor> {
            for (block, unit) in &blocks {
                x = unit.forward(x, |x| &x + block.forward(&x).tanh() * 0.2)?;
            }
            Ok(x)
        })?;
        let loss = outputs.mse_loss(&targets, tch::Reduction::Mean);
        model.backward(&loss)?;
        model.clip_grad_norm_(1e3)?;
        opt.step()?;
        opt.zero_grad()?;

        let mut mean = loss.detach() / group.size() as f64;
        group.all_reduce(&mut mean, ReduceOp::Sum)?;
        if let Some(expected) = expected.get(step) {
            let mean = mean.double_value(&[]);
            ensure!((mean - expected).abs() < 1e-5 * expected, "step {step}: a loss of {mean}, plain {expected}");
            if step % 5 == 4 {
                println!("step {}: a loss of {mean:.6}, plain {expected:.6}", step + 1);
            }
        }
    }
    Ok((vs, model))
}

/// The losses of the plain loop.
fn plain() -> Result<Vec<f64>> {
    tch::manual_seed(1);
    let (vs, blocks) = blocks(1);
    let mut opt = AdamW::builder(&vs).lr(1e-3).weight_decay(0.1).build()?;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let (inputs, targets): (Vec<_>, Vec<_>) = (0..RANKS).map(|rank| batch(step, rank)).unzip();
        let outputs = blocks.iter().fold(Tensor::cat(&inputs, 0), |x, block| &x + block.forward(&x).tanh() * 0.2);
        let loss = outputs.mse_loss(&Tensor::cat(&targets, 0), tch::Reduction::Mean);
        loss.f_backward()?;
        opt.step()?;
        opt.zero_grad()?;
        losses.push(loss.double_value(&[]));
    }
    Ok(losses)
}

fn blocks(seed: i64) -> (nn::VarStore, Vec<nn::Linear>) {
    tch::manual_seed(seed);
    let vs = nn::VarStore::new(Device::Cpu);
    let blocks = (0..BLOCKS).map(|number| block(&vs, number)).collect();
    (vs, blocks)
}

fn block(vs: &nn::VarStore, number: usize) -> nn::Linear {
    nn::linear(vs.root() / "blocks" / number, WIDTH, WIDTH, Default::default())
}

/// A rank's part of a batch.
fn batch(step: usize, rank: usize) -> (Tensor, Tensor) {
    tch::manual_seed((1000 + 10 * step + rank) as i64);
    let inputs = Tensor::randn([SAMPLES, WIDTH], FLOAT);
    let targets = inputs.roll(1, 1) * 0.5;
    (inputs, targets)
}

fn mb(bytes: usize) -> f64 {
    bytes as f64 / 1e6
}
