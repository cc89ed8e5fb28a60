//! A training with each way to partition.

use crate::versus::memory::disk::is_on_a_disk;
use anyhow::{Result, bail};
use overdrive::core::{IntoParameters, Parameter};
use overdrive::optim::LowPrecision;
use overdrive::prelude::*;
use overdrive::shard::{
    FullyShardedDataParallel, FullyShardedOptimizer, OffloadPolicy, ShardedDataParallel, ShardedUnit,
    ZeroRedundancyOptimizer,
};
use overdrive_ddp::{DistributedDataParallel, ProcessGroup};
use tch::nn::{Linear, Module as _, Path, VarStore, linear};

/// 24 blocks of this width have 100.7 million parameters.
pub const WIDTH: i64 = 2048;
pub const BLOCKS: u32 = 24;
/// The width of the blocks under a cap. A rank's part of one is in a file of its own.
pub const NARROW: i64 = 512;
const BATCH: i64 = 32;

/// A stack of linear layers.
pub struct Shape {
    widths: Vec<i64>,
    samples: i64,
}

impl Shape {
    /// So many blocks, and few samples: what is measured is the model.
    pub fn blocks(width: i64, number: u32) -> Self {
        Self { widths: vec![width; number as usize + 1], samples: 2 }
    }

    /// That of `versus ddp`.
    pub fn mlp() -> Self {
        Self { widths: vec![784, 2048, 2048, 2048, 10], samples: BATCH }
    }
}

enum Parts {
    Plain(DistributedDataParallel, AdamW),
    Optimizer(DistributedDataParallel, ZeroRedundancyOptimizer<AdamW>),
    Gradients(ShardedDataParallel, ZeroRedundancyOptimizer<AdamW>),
    All(FullyShardedDataParallel, FullyShardedOptimizer<AdamW>, Vec<ShardedUnit>),
}

pub struct Run {
    layers: Vec<Linear>,
    inputs: Tensor,
    parts: Parts,
    /// For what is in files.
    _folder: tempfile::TempDir,
    _vs: VarStore,
}

fn layer(path: Path<'_>, pair: &[i64], kind: Kind) -> Linear {
    let mut made = linear(path, pair[0], pair[1], Default::default());
    for tensor in [Some(&mut made.ws), made.bs.as_mut()].into_iter().flatten() {
        tensor.set_data(&tensor.to_kind(kind));
    }
    made
}

impl Run {
    pub fn new(group: &ProcessGroup, way: &str, shape: Shape, kind: Kind) -> Result<Self> {
        let vs = VarStore::new(Device::Cpu);
        let folder = tempfile::tempdir()?;
        let inputs = Tensor::randn([shape.samples, shape.widths[0]], (kind, Device::Cpu));
        let build = |params: Vec<Parameter>| {
            let precision = if kind == Kind::Float { LowPrecision::Nearest } else { LowPrecision::MasterCopy };
            AdamW::builder(params).lr(1e-3).low_precision(precision).build()
        };
        let at = |number: usize| vs.root() / format!("block{number}");
        if way == "zero3" || way == "disk" {
            if way == "disk" {
                is_on_a_disk(folder.path())?;
            }
            let policy =
                if way == "disk" { OffloadPolicy::Disk(folder.path().to_owned()) } else { OffloadPolicy::None };
            let mut sharding = FullyShardedDataParallel::builder(group)?.offload_policy(policy);
            let (mut layers, mut units) = (Vec::new(), Vec::new());
            for (number, pair) in shape.widths.windows(2).enumerate() {
                let layer = layer(at(number), pair, kind);
                let bias = layer.bs.as_ref().map(Tensor::shallow_clone).unwrap_or_default();
                units.push(sharding.unit(&format!("block{number}"), [("weight", &layer.ws), ("bias", &bias)])?);
                layers.push(layer);
            }
            let model = sharding.build(&vs)?;
            let opt = model.optimizer(build)?;
            let parts = Parts::All(model, opt, units);
            return Ok(Self { layers, inputs, parts, _folder: folder, _vs: vs });
        }
        let layers = shape.widths.windows(2).enumerate().map(|(number, pair)| layer(at(number), pair, kind)).collect();
        let ddp = || DistributedDataParallel::builder(group).gradient_as_bucket_view(true).build(&vs);
        let zero = || ZeroRedundancyOptimizer::new(&vs, group, build);
        let parts = match way {
            "plain" => Parts::Plain(ddp()?, build((&vs).into_parameters())?),
            "zero1" => Parts::Optimizer(ddp()?, zero()?),
            "zero2" => {
                let mut opt = zero()?;
                Parts::Gradients(ShardedDataParallel::new(&mut opt)?, opt)
            }
            _ => bail!("no way {way}"),
        };
        Ok(Self { layers, inputs, parts, _folder: folder, _vs: vs })
    }

    pub fn step(&mut self) -> Result<()> {
        let (layers, inputs) = (&self.layers, self.inputs.shallow_clone());
        let forward = || layers.iter().fold(inputs.shallow_clone(), |x, layer| layer.forward(&x).relu());
        let loss_of = |outputs: Tensor| outputs.square().mean(Kind::Float);
        match &mut self.parts {
            Parts::Plain(ddp, opt) => {
                ddp.backward(&loss_of(ddp.forward(forward)?))?;
                opt.step()?;
                opt.zero_grad()?;
            }
            Parts::Optimizer(ddp, opt) => {
                ddp.backward(&loss_of(ddp.forward(forward)?))?;
                opt.step()?;
                opt.zero_grad()?;
            }
            Parts::Gradients(sharded, opt) => {
                sharded.backward(&loss_of(forward()))?;
                opt.step()?;
                opt.zero_grad()?;
            }
            Parts::All(model, opt, units) => {
                let outputs = model.try_forward(inputs.shallow_clone(), |x| {
                    let mut both = layers.iter().zip(units.iter());
                    both.try_fold(x, |x, (layer, unit)| unit.forward(x, |x| layer.forward(&x).relu()))
                })?;
                model.backward(&loss_of(outputs))?;
                opt.step()?;
                opt.zero_grad()?;
            }
        }
        Ok(())
    }
}
