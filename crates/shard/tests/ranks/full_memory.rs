//! What libtorch's tensors take on a rank, beside plain `DistributedDataParallel`: parameters, gradients, state, buckets,
//! gathered units and activations at their peak.

use anyhow::{Result, ensure};
use overdrive_core::Optimizer;
use overdrive_ddp::{DistributedDataParallel, ProcessGroup};
use overdrive_ffi::host_memory;
use overdrive_optim::AdamW;
use overdrive_shard::FullyShardedDataParallel;
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;

const SIZE: i64 = 256;
const BLOCKS: usize = 24;
const BLOCK_BYTES: usize = 4 * (SIZE * SIZE + SIZE) as usize;
const STEPS: i64 = 3;

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    host_memory::count(usize::MAX)?;
    let plain = plain(&group)?;
    let sharded = sharded(&group)?;
    let all = group.all_gather_object(&sharded)?;
    let share = *all.iter().max().unwrap_or(&0) as f64 / plain as f64;
    println!("{} ranks: {all:?} of {plain} bytes, {share:.3}", group.size());
    ensure!(share <= if group.size() == 4 { 0.30 } else { 0.55 }, "{all:?} of {plain} bytes: {share:.3}");
    Ok(())
}

fn block(vs: &nn::VarStore, number: usize) -> nn::Linear {
    nn::linear(vs.root() / format!("block{number}"), SIZE, SIZE, Default::default())
}

fn inputs(step: i64) -> Tensor {
    tch::manual_seed(step);
    Tensor::randn([2, SIZE], (Kind::Float, Device::Cpu))
}

/// The peak since then.
fn peak(before: u64) -> Result<usize> {
    Ok((host_memory::stats()?.peak - before) as usize)
}

fn begin() -> Result<u64> {
    host_memory::reset_peak()?;
    Ok(host_memory::stats()?.allocated)
}

fn plain(group: &ProcessGroup) -> Result<usize> {
    let before = begin()?;
    let vs = nn::VarStore::new(Device::Cpu);
    let blocks: Vec<nn::Linear> = (0..BLOCKS).map(|number| block(&vs, number)).collect();
    let ddp = DistributedDataParallel::new(&vs, group)?;
    let mut opt = AdamW::builder(&vs).lr(1e-3).build()?;
    for step in 0..STEPS {
        let outputs = ddp.forward(|| blocks.iter().fold(inputs(step), |x, block| block.forward(&x).tanh()))?;
        ddp.backward(&outputs.square().mean(Kind::Float))?;
        opt.step()?;
        opt.zero_grad()?;
    }
    peak(before)
}

/// Made block by block: no rank ever has the whole model.
fn sharded(group: &ProcessGroup) -> Result<usize> {
    let before = begin()?;
    let vs = nn::VarStore::new(Device::Cpu);
    let mut builder = FullyShardedDataParallel::builder(group)?;
    let mut blocks = Vec::new();
    for number in 0..BLOCKS {
        let block = block(&vs, number);
        let bias = block.bs.as_ref().map(Tensor::shallow_clone).unwrap_or_default();
        let unit = builder.unit(&format!("block{number}"), [("weight", &block.ws), ("bias", &bias)])?;
        blocks.push((block, unit));
    }
    let fsdp = builder.build(&vs)?;
    let building = peak(before)?;
    ensure!(building < BLOCKS * BLOCK_BYTES / group.size() + 3 * BLOCK_BYTES, "building took {building} bytes");
    let mut opt = fsdp.optimizer(|params| AdamW::builder(params).lr(1e-3).build())?;
    for step in 0..STEPS {
        let outputs = fsdp.try_forward(inputs(step), |x| {
            blocks.iter().try_fold(x, |x, (block, unit)| unit.forward(x, |x| block.forward(&x).tanh()))
        })?;
        fsdp.backward(&outputs.square().mean(Kind::Float))?;
        opt.step()?;
        opt.zero_grad()?;
    }
    peak(before)
}
