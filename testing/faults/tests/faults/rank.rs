//! A rank: trains from the last checkpoint to the end, and meets with its fault on the way.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use overdrive::checkpoint::Writers;
use overdrive::prelude::*;
use overdrive_ddp::{Backend, DistributedDataParallel, InitMethod};
use overdrive_fakecuda::Fake;
use rustix::process::{Signal, getpid, kill_process};

use crate::cases::{Act, Moment};
use crate::harness::PATIENCE;

/// The folder of a run: its checkpoints, and what its ranks tell.
pub const FOLDER: &str = "OVERDRIVE_FAULTS_FOLDER";
/// How long ranks wait for each other, in milliseconds.
pub const TIMEOUT: &str = "OVERDRIVE_FAULTS_TIMEOUT";
/// `nccl` or `gloo`.
pub const TRANSPORT: &str = "OVERDRIVE_FAULTS_TRANSPORT";
/// A [`Moment`] of the first attempt; not set in a run that nothing disturbs.
pub const MOMENT: &str = "OVERDRIVE_FAULTS_MOMENT";

pub const STEPS: u64 = 24;
const EVERY: u64 = 4;
/// How many more steps a victim trains while its fault is pending, which may be late on a busy machine.
const GRACE: u64 = 3;

pub fn is_told() -> bool {
    std::env::var_os(FOLDER).is_some() && std::env::var_os("RANK").is_some()
}

fn folder() -> Result<PathBuf> {
    Ok(std::env::var_os(FOLDER).context("no folder was named")?.into())
}

fn number(name: &str) -> Result<u64> {
    std::env::var(name).with_context(|| name.to_owned())?.parse().with_context(|| name.to_owned())
}

/// Microseconds since 1970: all processes of a test are on one machine.
pub fn now() -> Result<u64> {
    Ok(u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH)?.as_micros())?)
}

/// Writes a file that is complete once it is there.
fn tell(name: &str, text: &str) -> Result<()> {
    let folder = folder()?;
    let part = folder.join(format!("{name}.part"));
    fs::write(&part, text)?;
    Ok(fs::rename(part, folder.join(name))?)
}

/// The file with the time of the fault.
pub fn fault_at(folder: &Path) -> PathBuf {
    folder.join("fault")
}

/// The file that asks for a fault from outside.
pub fn asked_at(folder: &Path) -> PathBuf {
    folder.join("asked")
}

/// The beginning of the names of files with an error and its time.
pub const TOLD: &str = "told-";
/// The beginning of the names of files with the number of a rank's process.
pub const BEGAN: &str = "began-";

fn act(act: Act) -> Result<()> {
    match act {
        Act::Kill => kill_process(getpid(), Signal::KILL)?,
        Act::Freeze => kill_process(getpid(), Signal::STOP)?,
        Act::CutLinks => Fake::get().context("only a fake link is cut from within")?.cut_links(),
        Act::Park | Act::Outside => {}
    }
    Ok(())
}

/// Called before each step of the victim.
fn meet(moment: &Moment, step: u64) -> Result<()> {
    if step == moment.step && moment.act == Act::Outside {
        tell("asked", "")?;
    } else if step == moment.step && moment.act == Act::Park {
        tell("fault", &now()?.to_string())?;
        loop {
            thread::park();
        }
    } else if step == moment.step {
        let moment = *moment;
        thread::spawn(move || {
            thread::sleep(moment.delay);
            tell("fault", &now()?.to_string())?;
            act(moment.act)
        });
    }
    if step >= moment.step + GRACE && moment.act != Act::CutLinks {
        loop {
            thread::park();
        }
    }
    Ok(())
}

pub fn train() -> Result<()> {
    let [rank, attempt] = ["RANK", "TORCHELASTIC_RESTART_COUNT"].map(number);
    let (rank, attempt) = (usize::try_from(rank?)?, attempt?);
    tell(&format!("{BEGAN}{attempt}-{rank}"), &std::process::id().to_string())?;
    let trained = train_as(rank, attempt);
    if let Err(error) = &trained {
        tell(&format!("{TOLD}{attempt}-{rank}"), &format!("{} {error:#}", now()?))?;
    }
    trained
}

fn train_as(rank: usize, attempt: u64) -> Result<()> {
    tch::set_num_threads(1);
    if let Some(fake) = Fake::get() {
        fake.compute().map_err(anyhow::Error::msg)?;
    }
    let moment = std::env::var(MOMENT).ok().filter(|_| attempt == 0).map(|it| it.parse::<Moment>()).transpose()?;
    let moment = moment.filter(|moment| moment.victim == rank);
    let is_nccl = std::env::var(TRANSPORT)? == "nccl";
    let builder = ProcessGroup::builder(if is_nccl { Backend::Nccl } else { Backend::Gloo }).timeout(PATIENCE);
    // Each rank has a device of its own, also where it is the first of its node.
    let builder = if is_nccl { builder.cuda_device(rank) } else { builder };
    let group = builder.init(&InitMethod::Auto)?;

    manual_seed(7);
    let model = sequential![nn::Linear::new(24, 48)?, nn::Relu, nn::Linear::new(48, 8)?];
    model.to(group.device())?;
    let mut opt = AdamW::builder(&model).lr(0.01).build()?;
    let mut model = model;
    let mut ddp = DistributedDataParallel::builder(&group).bucket_cap_mb(0.002).build(&model)?;
    let checkpoint = Checkpoint::builder(folder()?.join("checkpoints")).every(EVERY);
    let mut checkpoint = checkpoint.ranks(group.clone(), Writers::First).build()?;
    let resumed = checkpoint.resume(&mut [("model", &mut model), ("optimizer", &mut opt), ("ddp", &mut ddp)])?;
    // All connections are made while the timeout is still long.
    group.barrier()?;
    group.set_timeout(Duration::from_millis(number(TIMEOUT)?))?;
    for step in resumed.map_or(0, |resumed| resumed.step)..STEPS {
        if let Some(moment) = &moment {
            meet(moment, step)?;
        }
        manual_seed(1000 * step as i64 + rank as i64);
        let inputs = Tensor::randn([16, 24], (Kind::Float, Device::Cpu)).to_device(group.device());
        let loss = ddp.forward(|| model.forward(&inputs))??.square().mean(Kind::Float);
        ddp.backward(&loss)?;
        opt.step()?;
        opt.zero_grad()?;
        // A program that reads its loss waits for the device.
        ensure!(f64::try_from(&loss)?.is_finite(), "the loss is {loss}");
        if checkpoint.due(step + 1)? {
            checkpoint.save(step + 1, &[("model", &model), ("optimizer", &opt), ("ddp", &ddp)])?;
        }
    }
    ensure!(moment.is_none(), "the fault did not happen");
    checkpoint.finish()?;
    let weights = model.named_parameters();
    let bytes = weights.iter().map(|it| Vec::<f32>::try_from(&it.tensor().detach().to_device(Device::Cpu).view([-1])));
    let bytes =
        bytes.collect::<Result<Vec<_>, _>>()?.concat().iter().flat_map(|it| it.to_le_bytes()).collect::<Vec<u8>>();
    fs::write(folder()?.join(format!("weights-{rank}")), bytes)?;
    Ok(group.close()?)
}
