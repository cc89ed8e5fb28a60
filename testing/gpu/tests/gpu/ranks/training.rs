//! Training over NCCL: as over Gloo, in whatever order the devices get on, and each rank on its own device alone.

use anyhow::{Context, Result, ensure};
use overdrive::dataload::{OnDevice, TensorDataset};
use overdrive::prelude::*;
use overdrive_ddp::Backend;
use overdrive_fakecuda::Fake;

use super::processes::{Ended, Meeting, run};
use super::{group, pace, uses_only};

const BATCHES: i64 = 4;
const BATCH: i64 = 16;
const SEEDS: u64 = 50;

/// Where a rank's batches come from.
#[derive(Clone, Copy, Debug)]
enum Source {
    Loader,
    DeviceCache,
}

const SOURCES: [Source; 2] = [Source::Loader, Source::DeviceCache];

/// Trains at so many paces of the device after the eager one.
pub fn scenario(meeting: &Meeting) -> Result<()> {
    let [backend, last] = &meeting.arguments[..] else { anyhow::bail!("a backend and the last pace are needed") };
    let (on_nccl, last): (bool, u64) = (backend == "nccl", last.parse()?);
    let group = group(meeting, if on_nccl { Backend::Nccl } else { Backend::Gloo })?;
    let device = if on_nccl { Device::Cuda(meeting.rank) } else { Device::Cpu };
    for (pace, source) in (0..=last).map(pace).flat_map(|pace| SOURCES.map(|source| (pace, source))) {
        if let Some(fake) = Fake::get() {
            fake.find_races(true);
            ensure!(fake.guard_pinned(true), "pinned memory cannot be guarded");
            fake.reset();
            fake.set_pace(pace);
        }
        let at = || format!("rank {}, {source:?}, {pace:?}", meeting.rank);
        let result = train(&group, device, source);
        let notes = Fake::get().map(Fake::notes).unwrap_or_default();
        ensure!(notes.is_empty(), "{}: {}", at(), notes.join("; "));
        let result = result.with_context(at)?;
        println!("result {}", result.iter().map(f64::to_string).collect::<Vec<_>>().join(" "));
    }
    if on_nccl { uses_only(meeting.rank, meeting.size) } else { Ok(()) }
}

/// The losses, and the sum of each parameter.
fn train(group: &ProcessGroup, device: Device, source: Source) -> Result<Vec<f64>> {
    manual_seed(3);
    let model = sequential![nn::Linear::new(32, 64)?, nn::Relu, nn::Linear::new(64, 8)?];
    model.to(device)?;
    let ddp = DistributedDataParallel::builder(group).bucket_cap_mb(0.005).build(&model)?;
    let mut opt = AdamW::builder(&model).lr(0.01).build()?;
    let mut scaler = GradScaler::new(device);
    let loader = loader(group.rank(), device, source)?;
    let mut losses = Vec::new();
    let mut batches = loader.iter();
    for epoch in 0..2 {
        // The next epoch is made before this one is trained on.
        let following = (epoch == 0).then(|| loader.iter());
        for inputs in batches {
            let inputs = inputs?;
            let loss = ddp.forward(|| model.forward(&inputs))??.square().mean(Kind::Float);
            ddp.backward(&scaler.scale(&loss)?)?;
            scaler.step(&mut opt)?;
            scaler.update()?;
            opt.zero_grad()?;
            losses.push(loss.detach());
        }
        let Some(following) = following else { break };
        batches = following;
    }
    let params = model.named_parameters();
    let sums = params.iter().map(|it| it.tensor().detach().sum(Kind::Double));
    Ok(losses.iter().map(Tensor::shallow_clone).chain(sums).map(|it| it.double_value(&[])).collect())
}

fn loader(rank: usize, device: Device, source: Source) -> Result<DataLoader<Tensor>> {
    manual_seed(10 + rank as i64);
    let data = Tensor::randn([BATCHES * BATCH, 32], (Kind::Float, Device::Cpu));
    let builder = DataLoader::builder(TensorDataset::new(data)?).batch_size(BATCH as usize).num_workers(1);
    Ok(match source {
        Source::Loader => builder.to_device(device).build()?,
        Source::DeviceCache => builder.cache(OnDevice(device))?.build()?,
    })
}

fn results(ended: &Ended) -> Result<Vec<Vec<f64>>> {
    let numbers = |line: &str| line.split_whitespace().map(|word| Ok(word.parse()?)).collect();
    ended.lines("result").into_iter().map(numbers).collect()
}

/// Over NCCL as over Gloo, and no rank touches another's device.
fn as_over_gloo(size: usize) -> Result<()> {
    let last = if Fake::get().is_some() { SEEDS + 1 } else { 0 };
    let over_gloo = run("training", size, &["gloo", "0"])?;
    let over_nccl = run("training", size, &["nccl", &last.to_string()])?;
    for (rank, (gloo, nccl)) in over_gloo.iter().zip(&over_nccl).enumerate() {
        let (expected, found) = (results(gloo)?, results(nccl)?);
        let expected = expected.first().context("nothing over Gloo")?;
        ensure!(expected.len() == 2 * BATCHES as usize + 4, "{expected:?}");
        ensure!(found.len() == SOURCES.len() * (last as usize + 1), "{} results of rank {rank}", found.len());
        for (number, found) in found.iter().enumerate() {
            let is_near = |(found, expected): (&f64, &f64)| (found - expected).abs() <= 1e-5 * expected.abs().max(1.0);
            ensure!(
                found.len() == expected.len() && found.iter().zip(expected).all(is_near),
                "rank {rank}, {:?}: {found:?} over NCCL, {expected:?} over Gloo",
                pace((number / SOURCES.len()) as u64)
            );
        }
    }
    Ok(())
}

pub fn ddp_of_1_over_nccl_equals_gloos() -> Result<()> {
    as_over_gloo(1)
}

pub fn ddp_of_2_over_nccl_equals_gloos() -> Result<()> {
    as_over_gloo(2)
}

pub fn ddp_of_4_over_nccl_equals_gloos() -> Result<()> {
    as_over_gloo(4)
}
