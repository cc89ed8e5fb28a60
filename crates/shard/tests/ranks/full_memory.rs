//! What libtorch's tensors take on a rank, beside plain `DistributedDataParallel`: parameters, gradients, state, buckets,
//! gathered units and activations at their peak.

use anyhow::{Result, ensure};
use overdrive_core::Optimizer;
use overdrive_ddp::{DistributedDataParallel, ProcessGroup};
use overdrive_ffi::host_memory;
use overdrive_optim::AdamW;
use overdrive_shard::{FullyShardedDataParallel, OffloadPolicy};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;

const SIZE: i64 = 256;
const BLOCKS: usize = 24;
const STEPS: i64 = 3;

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    host_memory::count(usize::MAX)?;
    let plain = plain(&group)?;
    let (sharded, _) = sharded(&group, (SIZE, BLOCKS), OffloadPolicy::None)?;
    let all = group.all_gather_object(&sharded)?;
    let share = *all.iter().max().unwrap_or(&0) as f64 / plain as f64;
    println!("{} ranks: {all:?} of {plain} bytes, {share:.3}", group.size());
    ensure!(share <= if group.size() == 4 { 0.30 } else { 0.55 }, "{all:?} of {plain} bytes: {share:.3}");
    Ok(())
}

fn block(vs: &nn::VarStore, size: i64, number: usize) -> nn::Linear {
    nn::linear(vs.root() / format!("block{number}"), size, size, Default::default())
}

fn inputs(step: i64, size: i64) -> Tensor {
    tch::manual_seed(step);
    Tensor::randn([2, size], (Kind::Float, Device::Cpu))
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
    let blocks: Vec<nn::Linear> = (0..BLOCKS).map(|number| block(&vs, SIZE, number)).collect();
    let ddp = DistributedDataParallel::new(&vs, group)?;
    let mut opt = AdamW::builder(&vs).lr(1e-3).build()?;
    for step in 0..STEPS {
        let outputs = ddp.forward(|| blocks.iter().fold(inputs(step, SIZE), |x, block| block.forward(&x).tanh()))?;
        ddp.backward(&outputs.square().mean(Kind::Float))?;
        opt.step()?;
        opt.zero_grad()?;
    }
    peak(before)
}

/// With rows, gradients and state in files: the same steps, and memory for what computes alone.
pub fn on_disk(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    host_memory::count(usize::MAX)?;
    let folder = tempfile::tempdir()?;
    let (size, blocks) = (640, 24);
    let (_, expected) = sharded(&group, (size, blocks), OffloadPolicy::None)?;
    let (peak, found) = sharded(&group, (size, blocks), OffloadPolicy::Disk(folder.path().to_owned()))?;
    ensure!(
        found.len() == expected.len() && found.iter().zip(&expected).all(|(one, other)| one == other),
        "other steps"
    );
    // Parameters, gradients and AdamW's state of one process.
    let alone = 16 * blocks * (size * size + size) as usize;
    let all = group.all_gather_object(&peak)?;
    let share = *all.iter().max().unwrap_or(&0) as f64 / alone as f64;
    println!("{} ranks: {all:?} of {alone} bytes, {share:.3}", group.size());
    ensure!(share <= 0.125, "{all:?} of {alone} bytes: {share:.3}");
    ensure!(std::fs::read_dir(folder.path())?.next().is_none(), "files without names");
    Ok(())
}

/// Made block by block: no rank ever has the whole model. Returns the peak, and this rank's rows at the end.
fn sharded(group: &ProcessGroup, (size, count): (i64, usize), policy: OffloadPolicy) -> Result<(usize, Vec<Tensor>)> {
    let before = begin()?;
    tch::manual_seed(1);
    let block_bytes = 4 * (size * size + size) as usize;
    let vs = nn::VarStore::new(Device::Cpu);
    let mut builder = FullyShardedDataParallel::builder(group)?.offload_policy(policy.clone());
    let mut blocks = Vec::new();
    for number in 0..count {
        let block = block(&vs, size, number);
        let bias = block.bs.as_ref().map(Tensor::shallow_clone).unwrap_or_default();
        let unit = builder.unit(&format!("block{number}"), [("weight", &block.ws), ("bias", &bias)])?;
        blocks.push((block, unit));
    }
    let fsdp = builder.build(&vs)?;
    let building = peak(before)?;
    ensure!(building < count * block_bytes / group.size() + 3 * block_bytes, "building took {building} bytes");
    let mut opt = fsdp.optimizer(|params| AdamW::builder(params).lr(1e-3).build())?;
    for step in 0..STEPS {
        let outputs = fsdp.try_forward(inputs(step, size), |x| {
            blocks.iter().try_fold(x, |x, (block, unit)| unit.forward(x, |x| block.forward(&x).tanh()))
        })?;
        fsdp.backward(&outputs.square().mean(Kind::Float))?;
        fsdp.clip_grad_norm_(0.5)?;
        opt.step()?;
        opt.zero_grad()?;
    }
    let peak = peak(before)?;
    Ok((peak, fsdp.parameters().iter().map(|param| param.tensor().detach().copy()).collect()))
}
