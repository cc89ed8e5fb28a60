//! What goes with data-parallel training computes over NCCL what it does over Gloo: hooks, statistics, uneven inputs.

use anyhow::{Context, Result, ensure};
use overdrive::prelude::*;
use overdrive_ddp::hooks::{CastCompress, OneBit, PowerSgd, PowerSgdOptions, TopK};
use overdrive_ddp::{Backend, SyncBatchNorm};
use overdrive_fakecuda::Fake;
use tch::nn as tch_nn;
use tch::nn::Module as _;

use super::group;
use super::processes::{Meeting, run};

const RANKS: usize = 2;
const STEPS: i64 = 6;
const HOOKS: [&str; 7] = ["no hook", "float16", "float16 of libtorch", "bfloat16", "PowerSGD", "top-k", "1-bit"];

/// The parameters after training with a part.
pub fn scenario(meeting: &Meeting) -> Result<()> {
    let [backend, part] = &meeting.arguments[..] else { anyhow::bail!("a backend and a part are needed") };
    let on_nccl = backend == "nccl";
    let group = group(meeting, if on_nccl { Backend::Nccl } else { Backend::Gloo })?;
    let device = if on_nccl { Device::Cuda(meeting.rank) } else { Device::Cpu };
    match part.as_str() {
        "hooks" => HOOKS.iter().try_for_each(|hook| train(&group, device, hook, None))?,
        "statistics" => statistics(&group, device)?,
        "join" => [false, true].into_iter().try_for_each(|by| train(&group, device, "no hook", Some(by)))?,
        _ => anyhow::bail!("{part}"),
    }
    let notes = Fake::get().map(Fake::notes).unwrap_or_default();
    ensure!(notes.is_empty(), "rank {}: {}", meeting.rank, notes.join("; "));
    Ok(())
}

fn tell(what: &str, vs: &tch_nn::VarStore) {
    let mut variables: Vec<_> = vs.variables().into_iter().collect();
    variables.sort_by(|one, other| one.0.cmp(&other.0));
    for (name, variable) in variables {
        let numbers = Tensor::stack(&[variable.sum(Kind::Double), variable.square().sum(Kind::Double)], 0);
        println!("result {what}, {name}: {} {}", numbers.double_value(&[0]), numbers.double_value(&[1]));
    }
}

/// Different on each rank.
fn batch(rank: usize, step: i64, shape: &[i64], device: Device) -> Tensor {
    tch::manual_seed(100 * step + rank as i64);
    Tensor::randn(shape, (Kind::Float, Device::Cpu)).to_device(device)
}

fn descend(vs: &tch_nn::VarStore) {
    tch::no_grad(|| {
        for mut param in vs.trainable_variables() {
            let grad = param.grad();
            let _ = param.g_sub_(&(grad * 0.1));
            param.zero_grad();
        }
    });
}

/// Trains with a hook; within `join`, rank 1 has more batches.
fn train(group: &ProcessGroup, device: Device, hook: &str, join: Option<bool>) -> Result<()> {
    tch::manual_seed(1);
    let mut vs = tch_nn::VarStore::new(Device::Cpu);
    let linear = |name, from, to| tch_nn::linear(vs.root() / name, from, to, Default::default());
    let (first, second) = (linear("first", 24, 32), linear("second", 32, 8));
    vs.set_device(device);
    let ddp = DistributedDataParallel::builder(group).bucket_cap_mb(0.002).build(&vs)?;
    match hook {
        "float16" => ddp.register_comm_hook(CastCompress::half(group))?,
        "float16 of libtorch" => ddp.register_fp16_compress()?,
        "bfloat16" => ddp.register_comm_hook(CastCompress::bfloat16(group))?,
        "PowerSGD" => {
            let options = PowerSgdOptions { start_power_sgd_iter: 2, ..Default::default() };
            ddp.register_comm_hook(PowerSgd::new(group, options)?)?;
        }
        "top-k" => ddp.register_comm_hook(TopK::new(group, 0.1, 2)?)?,
        "1-bit" => ddp.register_comm_hook(OneBit::new(group, 2))?,
        _ => {}
    }
    let steps = |count: i64| -> Result<()> {
        for step in 0..count {
            let inputs = batch(group.rank(), step, &[4, 24], device);
            let loss = ddp.forward(|| second.forward(&first.forward(&inputs).relu()))?.square().mean(Kind::Float);
            ddp.backward(&loss)?;
            descend(&vs);
        }
        Ok(())
    };
    match join {
        Some(by_active_ranks) => ddp.join(by_active_ranks, || steps(STEPS + 3 * group.rank() as i64))??,
        None => steps(STEPS)?,
    }
    tell(&join.map_or_else(|| hook.to_owned(), |by| format!("join by active ranks: {by}")), &vs);
    Ok(())
}

/// Batches of different sizes, and every third one of a rank empty.
fn statistics(group: &ProcessGroup, device: Device) -> Result<()> {
    tch::manual_seed(1);
    // On the host, whose generator draws the same initial values for both backends.
    let mut vs = tch_nn::VarStore::new(Device::Cpu);
    let norm = SyncBatchNorm::new(vs.root() / "norm", 4, Default::default(), group);
    vs.set_device(device);
    let ddp = DistributedDataParallel::new(&vs, group)?;
    for step in 0..STEPS {
        let rows = [5, 0, 3][(group.rank() + step as usize) % 3];
        let inputs = batch(group.rank(), step, &[rows, 4, 3], device);
        let outputs = ddp.forward(|| norm.forward_t(&inputs, true))??;
        ddp.backward(&outputs.sin().sum(Kind::Float))?;
        descend(&vs);
    }
    tell("statistics", &vs);
    Ok(())
}

/// Each rank's numbers over NCCL are those over Gloo.
fn as_over_gloo(part: &str, lines: usize) -> Result<()> {
    let (over_gloo, over_nccl) = (run("parts", RANKS, &["gloo", part])?, run("parts", RANKS, &["nccl", part])?);
    for (rank, (gloo, nccl)) in over_gloo.iter().zip(&over_nccl).enumerate() {
        let (expected, found) = (gloo.lines("result"), nccl.lines("result"));
        ensure!(expected.len() == lines && found.len() == lines, "{expected:?}, {found:?}");
        for (found, expected) in found.iter().zip(&expected) {
            ensure!(are_near(found, expected)?, "rank {rank}: {found} over NCCL, {expected} over Gloo");
        }
    }
    Ok(())
}

fn are_near(found: &str, expected: &str) -> Result<bool> {
    let split = |line: &str| -> Result<(String, Vec<f64>)> {
        let (name, numbers) = line.rsplit_once(": ").context("no numbers")?;
        Ok((name.to_owned(), numbers.split(' ').map(str::parse).collect::<Result<_, _>>()?))
    };
    let (found, expected) = (split(found)?, split(expected)?);
    let is_near = |(found, expected): (&f64, &f64)| (found - expected).abs() <= 1e-5 * expected.abs().max(1.0);
    Ok(found.0 == expected.0 && found.1.iter().zip(&expected.1).all(is_near))
}

pub fn hooks_over_nccl_equal_gloos() -> Result<()> {
    as_over_gloo("hooks", 4 * HOOKS.len())
}

pub fn statistics_of_uneven_batches_over_nccl_equal_gloos() -> Result<()> {
    as_over_gloo("statistics", 4)
}

pub fn join_over_nccl_equals_gloos() -> Result<()> {
    as_over_gloo("join", 2 * 4)
}
