//! Steps on the host for ranks whose gradients are averaged over NCCL: as plain ones over Gloo.

use anyhow::{Context, Result, ensure};
use overdrive::core::{OptimizerError, Parameter};
use overdrive::memory::CpuOffloadOptimizer;
use overdrive::prelude::*;
use overdrive_ddp::Backend;
use overdrive_fakecuda::{Fake, Pace};

use super::processes::{Meeting, run};
use super::{group, uses_only};

const RANKS: usize = 2;
const STEPS: i64 = 4;
const SEEDS: u64 = 10;

fn adamw(params: Vec<Parameter>) -> Result<AdamW, OptimizerError> {
    AdamW::builder(params).lr(0.01).weight_decay(0.1).build()
}

/// Trains over Gloo once, or over NCCL with gradients that stay on the device and with those that leave it, at each pace.
pub fn scenario(meeting: &Meeting) -> Result<()> {
    let [backend] = &meeting.arguments[..] else { anyhow::bail!("a backend is needed") };
    if backend == "gloo" {
        let group = group(meeting, Backend::Gloo)?;
        return train(&group, Device::Cpu, |model| adamw(model.named_parameters()));
    }
    let (group, device) = (group(meeting, Backend::Nccl)?, Device::Cuda(meeting.rank));
    for pace in paces() {
        if let Some(fake) = Fake::get() {
            fake.find_races(true);
            ensure!(fake.guard_pinned(true), "pinned memory cannot be guarded");
            fake.reset();
            fake.set_pace(pace);
        }
        train(&group, device, |model| CpuOffloadOptimizer::new(model, adamw))?;
        train(&group, device, |model| CpuOffloadOptimizer::with_offloaded_gradients(model, adamw))?;
        let notes = Fake::get().map(Fake::notes).unwrap_or_default();
        ensure!(notes.is_empty(), "rank {}, {pace:?}: {}", meeting.rank, notes.join("; "));
    }
    uses_only(meeting.rank, meeting.size)
}

fn paces() -> Vec<Pace> {
    crate::loading::paces(SEEDS)
}

/// Prints the losses, and the sum of each parameter.
fn train<O: Optimizer>(
    group: &ProcessGroup,
    device: Device,
    optimizer: impl FnOnce(&nn::Sequential) -> Result<O, OptimizerError>,
) -> Result<()> {
    manual_seed(3);
    let model = sequential![nn::Linear::new(24, 40)?, nn::Relu, nn::Linear::new(40, 8)?];
    model.to(device)?;
    let ddp = DistributedDataParallel::builder(group).bucket_cap_mb(0.003).build(&model)?;
    let mut opt = optimizer(&model)?;
    let mut told = Vec::new();
    for step in 0..STEPS {
        manual_seed(10 * step + group.rank() as i64);
        let inputs = Tensor::randn([16, 24], (Kind::Float, Device::Cpu)).to_device(device);
        let loss = ddp.forward(|| model.forward(&inputs))??.square().mean(Kind::Float);
        ddp.backward(&loss)?;
        opt.step()?;
        opt.zero_grad()?;
        told.push(loss.detach());
    }
    told.extend(model.named_parameters().iter().map(|it| it.tensor().detach().sum(Kind::Double)));
    let numbers: Vec<_> = told.iter().map(|it| it.double_value(&[]).to_string()).collect();
    println!("result {}", numbers.join(" "));
    Ok(())
}

pub fn steps_on_the_host_over_nccl_equal_plain_ones_over_gloo() -> Result<()> {
    let (over_gloo, over_nccl) = (run("offload", RANKS, &["gloo"])?, run("offload", RANKS, &["nccl"])?);
    let numbers = |line: &str| -> Result<Vec<f64>> { line.split(' ').map(|word| Ok(word.parse()?)).collect() };
    for (rank, (gloo, nccl)) in over_gloo.iter().zip(&over_nccl).enumerate() {
        let expected = numbers(gloo.lines("result").first().context("nothing over Gloo")?)?;
        let found = nccl.lines("result");
        ensure!(found.len() == 2 * paces().len() && expected.len() == STEPS as usize + 4, "{found:?}, {expected:?}");
        for line in found {
            let found = numbers(line)?;
            let is_near = |(found, expected): (&f64, &f64)| (found - expected).abs() <= 1e-5 * expected.abs().max(1.0);
            ensure!(
                found.len() == expected.len() && found.iter().zip(&expected).all(is_near),
                "rank {rank}: {found:?} over NCCL, {expected:?} over Gloo"
            );
        }
    }
    Ok(())
}
