//! DDP over NCCL: ranks are processes, this program again with variables that tell it so, each on a device of its own.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use overdrive::prelude::*;
use overdrive_ddp::{Backend, DistributedDataParallel, InitMethod, ProcessGroup};
use overdrive_fakecuda::{Fake, Pace, environment};

const TOLD: &str = "OVERDRIVE_GPU_TESTS_RANK";
const STEPS: usize = 5;

/// What a rank is told: backend, seed of the device's pace, rank, number of ranks, and the file to meet in.
fn told() -> Option<Vec<String>> {
    Some(std::env::var(TOLD).ok()?.split(',').map(str::to_owned).collect())
}

/// Runs a rank, if this process is one.
pub fn main_if_told() -> Option<Result<()>> {
    let told = told()?;
    Some(rank(&told).inspect_err(|error| eprintln!("{error:#}")))
}

fn rank(told: &[String]) -> Result<()> {
    let [backend, seed, rank, world_size, path] = told else { bail!("{told:?} is not what a rank is told") };
    let (rank, world_size, seed): (usize, usize, u64) = (rank.parse()?, world_size.parse()?, seed.parse()?);
    tch::set_num_threads(1);
    let on_nccl = backend == "nccl";
    if let Some(fake) = Fake::get().filter(|_| on_nccl) {
        fake.compute().map_err(anyhow::Error::msg)?;
        fake.find_races(true);
        fake.set_pace(if seed == 0 { Pace::Eager } else { Pace::Random(seed) });
    }
    let device = if on_nccl { Device::Cuda(rank) } else { Device::Cpu };
    let builder = ProcessGroup::builder(if on_nccl { Backend::Nccl } else { Backend::Gloo });
    let builder = builder.timeout(Duration::from_secs(120));
    let builder = if on_nccl { builder.cuda_device(rank) } else { builder };
    let group = builder.init(&InitMethod::File { path: path.into(), rank, world_size })?;

    manual_seed(3);
    let model = sequential![nn::Linear::new(32, 64)?, nn::Relu, nn::Linear::new(64, 8)?];
    model.to(device)?;
    let ddp = DistributedDataParallel::builder(&group).bucket_cap_mb(0.005).build(&model)?;
    let mut opt = AdamW::builder(&model).lr(0.01).build()?;
    manual_seed(10 + rank as i64);
    let data = Tensor::randn([STEPS as i64, 16, 32], (Kind::Float, Device::Cpu)).to_device(device);
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let inputs = data.select(0, step as i64);
        let loss = ddp.forward(|| model.forward(&inputs))??.square().mean(Kind::Float);
        loss.backward();
        opt.step()?;
        opt.zero_grad()?;
        losses.push(loss.detach());
    }
    let losses: Vec<f64> = losses.iter().map(|loss| loss.double_value(&[])).collect();
    let sum: Vec<f64> =
        model.named_parameters().iter().map(|it| it.tensor().detach().sum(Kind::Double).double_value(&[])).collect();
    if let Some(fake) = Fake::get().filter(|_| on_nccl) {
        let (notes, counts) = (fake.notes(), fake.counts());
        ensure!(notes.is_empty(), "rank {rank}, seed {seed}: {}", notes.join("; "));
        let contexts: Vec<_> = counts.keys().filter(|name| name.starts_with("contexts on device")).collect();
        ensure!(contexts == [&format!("contexts on device {rank}")], "rank {rank} has {contexts:?}");
    }
    println!("result {losses:?} {sum:?}");
    Ok(())
}

/// What the ranks print, in their order.
fn run(backend: &str, seed: u64, world_size: usize) -> Result<Vec<String>> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("meet");
    let start = |rank: usize| {
        let mut command = Command::new(std::env::current_exe()?);
        command.env(TOLD, format!("{backend},{seed},{rank},{world_size},{}", shown(&path)));
        if Fake::get().is_some() {
            command.envs(environment(world_size));
        }
        command.stdout(Stdio::piped()).spawn().context("cannot start a rank")
    };
    let ranks = (0..world_size).map(start).collect::<Result<Vec<_>>>()?;
    let mut results = Vec::new();
    for (rank, child) in ranks.into_iter().enumerate() {
        let output = child.wait_with_output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let result = text.lines().find_map(|line| line.strip_prefix("result "));
        results.push(result.with_context(|| format!("rank {rank} over {backend}: {}", output.status))?.to_owned());
    }
    Ok(results)
}

fn shown(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn numbers(results: &[String]) -> Vec<f64> {
    let words = results.iter().flat_map(|result| result.split(|it: char| "[], ".contains(it)));
    words.filter_map(|word| word.parse().ok()).collect()
}

/// Over NCCL as over Gloo, whenever the device gets on; no rank has a context on another's device.
fn as_over_gloo(world_size: usize, seeds: &[u64]) -> Result<()> {
    if Fake::get().is_none() && tch::Cuda::device_count() < world_size as i64 {
        println!("skipped: fewer than {world_size} GPUs");
        return Ok(());
    }
    let expected = numbers(&run("gloo", 0, world_size)?);
    for &seed in seeds {
        let found = numbers(&run("nccl", seed, world_size)?);
        ensure!(found.len() == expected.len() && !found.is_empty(), "{found:?} instead of {expected:?}");
        for (found, expected) in found.iter().zip(&expected) {
            ensure!((found - expected).abs() <= 1e-5 * expected.abs().max(1.0), "seed {seed}: {found}, {expected}");
        }
    }
    Ok(())
}

pub fn ddp_of_2_over_nccl_equals_gloos() -> Result<()> {
    as_over_gloo(2, &[0, 1, 2, 3])
}

pub fn ddp_of_4_over_nccl_equals_gloos() -> Result<()> {
    as_over_gloo(4, &[0, 1])
}
