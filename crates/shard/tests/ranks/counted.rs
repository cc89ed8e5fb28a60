//! What libtorch's tensors take on a rank with each stage, beside plain data parallelism: 24 layers that are exchanged one by
//! one, as those of a large model are.

use anyhow::{Result, ensure};
use overdrive_core::{IntoParameters, Optimizer, Parameter};
use overdrive_ddp::{DistributedDataParallel, ProcessGroup};
use overdrive_ffi::host_memory;
use overdrive_optim::{AdamW, LowPrecision};
use overdrive_shard::{FullyShardedDataParallel, ShardedDataParallel, ZeroRedundancyOptimizer};
use tch::nn::{Linear, Module, VarStore, linear};
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;

const SIZE: i64 = 768;
const LAYERS: usize = 24;
/// A layer in float32 has more than half of it, as one of 2048 x 2048 has of 25 MiB.
const BUCKET: usize = 7 << 19;

/// The largest rank's peak of plain data parallelism is 1.
const LARGEST: [(Kind, [f64; 3]); 2] = [(Kind::Float, [0.65, 0.47, 0.30]), (Kind::BFloat16, [0.46, 0.38, 0.30])];

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    host_memory::count(usize::MAX)?;
    for (kind, largest) in LARGEST {
        let plain = largest_peak(&group, plain, kind)?;
        for (stage, (run, largest)) in [zero1, zero2, zero3].into_iter().zip(largest).enumerate() {
            let share = largest_peak(&group, run, kind)? / plain;
            println!("{kind:?}, ZeRO-{}: {share:.3}", stage + 1);
            ensure!(share <= largest, "{kind:?}, ZeRO-{}: {share:.3}, and at most {largest} is wanted", stage + 1);
        }
    }
    Ok(())
}

type Way = fn(&ProcessGroup, Kind) -> Result<()>;

/// Of all ranks.
fn largest_peak(group: &ProcessGroup, way: Way, kind: Kind) -> Result<f64> {
    let before = host_memory::stats()?.allocated;
    way(group, kind)?;
    let own = host_memory::stats()?.peak - before;
    Ok(group.all_gather_object(&own)?.into_iter().max().unwrap_or(0) as f64)
}

fn layer(vs: &VarStore, number: usize, kind: Kind) -> Linear {
    let mut made = linear(vs.root() / number, SIZE, SIZE, Default::default());
    for tensor in [Some(&mut made.ws), made.bs.as_mut()].into_iter().flatten() {
        tensor.set_data(&tensor.to_kind(kind));
    }
    made
}

fn adamw(params: Vec<Parameter>) -> Result<AdamW, overdrive_core::OptimizerError> {
    AdamW::builder(params).lr(1e-3).low_precision(LowPrecision::MasterCopy).build()
}

/// Three steps; `pass` averages gradients. Counts from the first pass on: Gloo keeps what it has sent for a moment.
fn train(opt: &mut impl Optimizer, mut pass: impl FnMut() -> Result<()>) -> Result<()> {
    pass()?;
    host_memory::reset_peak()?;
    opt.zero_grad()?;
    for _ in 0..3 {
        pass()?;
        opt.step()?;
        opt.zero_grad()?;
    }
    Ok(())
}

fn inputs(kind: Kind) -> Tensor {
    Tensor::randn([2, SIZE], (kind, Device::Cpu))
}

fn forward(layers: &[Linear], kind: Kind) -> Tensor {
    layers.iter().fold(inputs(kind), |x, layer| layer.forward(&x).relu())
}

fn layers(vs: &VarStore, kind: Kind) -> Vec<Linear> {
    (0..LAYERS).map(|number| layer(vs, number, kind)).collect()
}

fn loss_of(outputs: &Tensor) -> Tensor {
    outputs.square().mean(Kind::Float)
}

fn ddp_over(vs: &VarStore, group: &ProcessGroup) -> Result<DistributedDataParallel> {
    let builder = DistributedDataParallel::builder(group).gradient_as_bucket_view(true);
    Ok(builder.bucket_cap_mb(3.5).build(vs)?)
}

fn plain(group: &ProcessGroup, kind: Kind) -> Result<()> {
    let vs = VarStore::new(Device::Cpu);
    let layers = layers(&vs, kind);
    let ddp = ddp_over(&vs, group)?;
    let mut opt = adamw((&vs).into_parameters())?;
    train(&mut opt, || Ok(ddp.backward(&loss_of(&ddp.forward(|| forward(&layers, kind))?))?))
}

fn zero1(group: &ProcessGroup, kind: Kind) -> Result<()> {
    let vs = VarStore::new(Device::Cpu);
    let layers = layers(&vs, kind);
    let ddp = ddp_over(&vs, group)?;
    let mut opt = ZeroRedundancyOptimizer::new(&vs, group, adamw)?.bucket_bytes(BUCKET)?;
    train(&mut opt, || Ok(ddp.backward(&loss_of(&ddp.forward(|| forward(&layers, kind))?))?))
}

fn zero2(group: &ProcessGroup, kind: Kind) -> Result<()> {
    let vs = VarStore::new(Device::Cpu);
    let layers = layers(&vs, kind);
    let mut opt = ZeroRedundancyOptimizer::new(&vs, group, adamw)?.bucket_bytes(BUCKET)?;
    let sharded = ShardedDataParallel::with_bucket_bytes(&mut opt, BUCKET)?;
    train(&mut opt, || Ok(sharded.backward(&loss_of(&forward(&layers, kind)))?))
}

fn zero3(group: &ProcessGroup, kind: Kind) -> Result<()> {
    let vs = VarStore::new(Device::Cpu);
    let mut builder = FullyShardedDataParallel::builder(group)?;
    let (mut layers, mut units) = (Vec::new(), Vec::new());
    for number in 0..LAYERS {
        let layer = layer(&vs, number, kind);
        let bias = layer.bs.as_ref().map(Tensor::shallow_clone).unwrap_or_default();
        units.push(builder.unit(&number.to_string(), [("weight", &layer.ws), ("bias", &bias)])?);
        layers.push(layer);
    }
    let model = builder.build(&vs)?;
    let mut opt = model.optimizer(adamw)?;
    train(&mut opt, || {
        let outputs = model.try_forward(inputs(kind), |x| {
            let mut both = layers.iter().zip(&units);
            both.try_fold(x, |x, (layer, unit)| unit.forward(x, |x| layer.forward(&x).relu()))
        })?;
        Ok(model.backward(&loss_of(&outputs))?)
    })
}
