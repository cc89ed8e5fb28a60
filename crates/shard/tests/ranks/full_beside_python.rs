//! ZeRO-3 beside Python's `fully_shard` on as many ranks over Gloo: losses and parameters are equal to the bit, and with
//! our fused kernels to 1e-6.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use overdrive_core::{Entry, Optimizer, OptimizerError, Parameter};
use overdrive_ddp::ProcessGroup;
use overdrive_optim::{AdamW, Sgd};
use overdrive_shard::{FullyShardedDataParallel, ShardError};
use tch::{Device, Kind, Tensor};

use crate::beside_python::{FOLDER, beside, numbers};
use crate::harness::Meeting;

const SHAPES: [&[i64]; 6] = [&[24, 10], &[24], &[15, 24], &[15], &[3, 15], &[3]];
const STEPS: usize = 20;

pub fn equals() -> Result<()> {
    beside("full_rank.py", "full_beside_python")
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let folder = PathBuf::from(std::env::var_os(FOLDER).context(FOLDER)?);
    let sgd = |params: Vec<Parameter>| Sgd::builder(params).lr(0.1).momentum(0.9).weight_decay(1e-3);
    let adamw = |params: Vec<Parameter>| AdamW::builder(params).lr(0.01).weight_decay(0.1);
    // Python has no fused kernels over DTensors: without ours, equal to the bit.
    trains(&group, &folder, "sgd", |params| sgd(params).fused(false).build(), 0.0).context("SGD")?;
    trains(&group, &folder, "adamw", |params| adamw(params).fused(false).build(), 0.0).context("AdamW")?;
    trains(&group, &folder, "sgd", |params| sgd(params).build(), 1e-6).context("SGD, fused")?;
    trains(&group, &folder, "adamw", |params| adamw(params).build(), 1e-6).context("AdamW, fused")
}

fn trains<O: Optimizer>(
    group: &ProcessGroup,
    folder: &Path,
    name: &str,
    build: impl FnOnce(Vec<Parameter>) -> Result<O, OptimizerError>,
    bound: f64,
) -> Result<()> {
    let float = (Kind::Float, Device::Cpu);
    tch::manual_seed(1);
    let params: Vec<Tensor> =
        SHAPES.iter().map(|shape| (Tensor::randn(*shape, float) * 0.3).set_requires_grad(true)).collect();
    // Not `0.3 * values` within a graph: leaves.
    let params: Vec<Tensor> = params.iter().map(|it| it.detach().copy().set_requires_grad(true)).collect();
    let named = |at: usize| (format!("p{at}"), params[at].shallow_clone());
    let mut builder = FullyShardedDataParallel::builder(group)?;
    let units = (0..2)
        .map(|layer| builder.unit(&format!("layer{layer}"), [named(2 * layer), named(2 * layer + 1)]))
        .collect::<Result<Vec<_>, _>>()?;
    let model = builder.build((0..6).map(named).collect::<Vec<_>>())?;
    let mut opt = model.optimizer(build)?;
    let losses = numbers(folder.join(format!("{name}.losses.{}", group.rank())))?;
    let theirs = numbers(folder.join(name))?;
    let count: usize = SHAPES.iter().map(|shape| shape.iter().product::<i64>() as usize).sum();
    ensure!(losses.len() == STEPS && theirs.len() == STEPS * count);
    let (mut off_loss, mut off_param) = (0.0f64, 0.0f64);
    for step in 0..STEPS {
        tch::manual_seed((1000 + 10 * step + group.rank()) as i64);
        let (x, y) = (Tensor::randn([8, 10], float), Tensor::randn([8, 3], float));
        let linear = |x: &Tensor, layer: usize| x.linear(&params[2 * layer], Some(&params[2 * layer + 1]));
        let outputs = model.try_forward(x, |mut x| {
            for (layer, unit) in units.iter().enumerate() {
                x = unit.forward(x, |x| linear(&x, layer))?.tanh();
            }
            Ok::<_, ShardError>(linear(&x, 2))
        })?;
        let loss = (outputs - &y).square().mean(Kind::Float);
        model.backward(&loss)?;
        opt.step()?;
        opt.zero_grad()?;
        let (loss, expected) = (loss.double_value(&[]), f64::from(losses[step]));
        off_loss = off_loss.max((loss - expected).abs() / expected);
        ensure!(off_loss <= bound, "step {step}: a loss of {loss}, Python's is {expected}");
        let Some(whole) = model.consolidate_state_dict(0)? else { continue };
        let whole: Vec<Tensor> = whole
            .iter()
            .filter_map(|(_, entry)| match entry {
                Entry::Tensor(tensor) => Some(tensor.view([-1])),
                _ => None,
            })
            .collect();
        let ours = Tensor::cat(&whole, 0);
        let theirs = Tensor::from_slice(&theirs[step * count..(step + 1) * count]);
        off_param = off_param.max((&ours - &theirs).abs().max().double_value(&[]));
        ensure!(off_param <= bound, "step {step}: parameters are off by {off_param}");
    }
    println!("{name}: losses are off by {off_loss:e} at most, parameters by {off_param:e}");
    Ok(())
}
