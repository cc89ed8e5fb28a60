//! ZeRO-3 whose rows, gradients and state are in host memory or in files.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use overdrive_core::{Optimizer, OptimizerError, Parameter, StateDict, Stateful, TorchErrorKind};
use overdrive_ddp::ProcessGroup;
use overdrive_memory::CpuOffloadOptimizer;
use overdrive_shard::{
    FullyShardedDataParallel, FullyShardedOptimizer, OffloadPolicy, ShardError, ShardedUnit, ZeroRedundancyOptimizer,
};
use rustix::process::{Resource, Rlimit, setrlimit};
use tch::{Device, Kind, Tensor};

use crate::harness::{Meeting, run};
use crate::model::{same, same_state};
use crate::zero::adamw;

/// Rows of one rank are so large that they are in files.
const SIZE: i64 = 400;
const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

struct Run {
    fsdp: FullyShardedDataParallel,
    opt: FullyShardedOptimizer<Box<dyn Optimizer>>,
    layers: Vec<(Tensor, ShardedUnit)>,
}

impl Run {
    fn new(group: &ProcessGroup, policy: &OffloadPolicy) -> Result<Self> {
        tch::manual_seed(5);
        let mut builder = FullyShardedDataParallel::builder(group)?.offload_policy(policy.clone());
        let mut layers = Vec::new();
        for number in 0..4 {
            let weight = (Tensor::randn([SIZE, SIZE], DOUBLE) / 20.0).set_requires_grad(true);
            let unit = builder.unit(&format!("layer{number}"), [("weight", &weight)])?;
            layers.push((weight, unit));
        }
        let named = layers.iter().enumerate().map(|(at, (weight, _))| (format!("{at}"), weight.shallow_clone()));
        let fsdp = builder.build(named.collect::<Vec<_>>())?;
        let opt = fsdp.optimizer(adamw)?;
        Ok(Self { fsdp, opt, layers })
    }

    fn pass(&self, number: i64, exchanges: bool) -> Result<()> {
        tch::manual_seed(100 + number);
        let inputs = Tensor::randn([3, SIZE], DOUBLE);
        let outputs = self.fsdp.try_forward(inputs, |x| {
            self.layers.iter().try_fold(x, |x, (weight, unit)| unit.forward(x, |x| x.matmul(weight).tanh()))
        })?;
        let _held = (!exchanges).then(|| self.fsdp.no_sync());
        Ok(self.fsdp.backward(&outputs.square().mean(Kind::Double))?)
    }

    /// A step of three passes, of which one leaves gradients local.
    fn step(&mut self, number: i64) -> Result<()> {
        for (pass, exchanges) in [true, false, true].into_iter().enumerate() {
            self.pass(10 * number + pass as i64, exchanges)?;
        }
        self.fsdp.clip_grad_norm_(1e-3)?;
        self.opt.step()?;
        self.opt.zero_grad()?;
        Ok(())
    }

    fn rows(&self) -> Vec<(String, Tensor)> {
        let row = |param: &Parameter| (param.label(0), param.tensor().detach());
        self.fsdp.parameters().iter().map(row).collect()
    }

    fn states(&self) -> Result<[StateDict; 2]> {
        Ok([self.fsdp.state_dict()?, self.opt.state_dict()?])
    }
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let folder = tempfile::tempdir()?;
    let on_disk = OffloadPolicy::Disk(folder.path().to_owned());
    for policy in [OffloadPolicy::Cpu, on_disk.clone()] {
        as_on_the_device(&group, &policy).with_context(|| format!("{policy:?}"))?;
    }
    vanished(&group).context("a folder that is gone")?;
    refusals(&group, &on_disk)
}

/// Where a rank's folder is gone in the middle of a pass, all end the pass, are told, and may go on without gradients.
fn vanished(group: &ProcessGroup) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut run = Run::new(group, &OffloadPolicy::Disk(folder.path().to_owned()))?;
    run.step(0)?;
    if group.rank() == 0 {
        folder.close()?;
    }
    let passed = run.pass(50, true);
    if group.rank() == 0 {
        let text = passed.err().context("the pass had room for its gradients")?.to_string();
        ensure!(text.contains("no file of "), "{text}");
    } else {
        passed?;
        let told = run.fsdp.clip_grad_norm_(1.0).err().context("it was not told")?;
        ensure!(matches!(&told, ShardError::OtherRank { rank: 0, .. }), "{told:?}");
    }
    run.opt.zero_grad()?;
    let plain = Run::new(group, &OffloadPolicy::None)?;
    let outputs = |run: &Run| {
        let layers = &run.layers;
        tch::no_grad(|| {
            run.fsdp.try_forward(Tensor::ones([3, SIZE], DOUBLE), |x| {
                layers.iter().try_fold(x, |x, (weight, unit)| unit.forward(x, |x| x.matmul(weight).tanh()))
            })
        })
    };
    ensure!(outputs(&run)?.size() == outputs(&plain)?.size());
    Ok(())
}

/// Set where a rank may be denied large files without being killed.
const DENIES_FILES: &str = "OVERDRIVE_TEST_DENIES_FILES";

/// Ranks ignore the signal that comes with a file of more than the limit.
pub fn run_full_disk() -> Result<()> {
    if std::env::var_os(DENIES_FILES).is_some() {
        return run("full_disk", 2).map(drop);
    }
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' XFSZ; exec \"$0\" \"$@\""]).arg(std::env::current_exe()?);
    let output = command.args(["--exact", FULL_DISK]).env(DENIES_FILES, "1").output()?;
    let told = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success() && told.contains("1 passed"), "{told}");
    Ok(())
}

pub const FULL_DISK: &str = "a_full_disk_under_offload_is_told_on_every_rank";

/// On rank 1, files may not be larger than 64 KiB: as on a full disk.
fn fill_disk(rank: usize, is_full: bool) -> Result<()> {
    let current = (rank == 1 && is_full).then_some(1 << 16);
    Ok(setrlimit(Resource::Fsize, Rlimit { current, maximum: None })?)
}

/// Rank 1 gets an error of the disk, and the others one that names rank 1.
fn is_told(rank: usize, what: &str, told: Result<(), anyhow::Error>) -> Result<()> {
    let error = told.err().with_context(|| format!("{what}: no error"))?;
    let of_shard = error.downcast_ref::<ShardError>();
    let of_step = error.downcast_ref::<OptimizerError>();
    let torch = match (of_shard, of_step) {
        (Some(ShardError::Torch(torch) | ShardError::Optimizer(OptimizerError::Torch(torch))), _) => Some(torch),
        (_, Some(OptimizerError::Torch(torch))) => Some(torch),
        _ => None,
    };
    let is_it = match rank {
        1 => {
            torch.is_some_and(|torch| torch.kind() == TorchErrorKind::Io && torch.message().contains("File too large"))
        }
        _ => {
            torch.is_none() && error.to_string().contains("no file of ") && error.to_string().contains("rank 1 reports")
        }
    };
    ensure!(is_it, "{what}, rank {rank}: {error:?}");
    Ok(())
}

/// The disk is full while a unit is sharded, in a backward pass, and in a step; with room again, all go on.
pub fn full_disk(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let (rank, folder) = (group.rank(), tempfile::tempdir()?);
    let on_disk = OffloadPolicy::Disk(folder.path().to_owned());
    fill_disk(rank, true)?;
    is_told(rank, "sharding", Run::new(&group, &on_disk).map(drop))?;
    fill_disk(rank, false)?;

    let (mut run, mut plain) = (Run::new(&group, &on_disk)?, Run::new(&group, &OffloadPolicy::None)?);
    run.step(0)?;
    plain.step(0)?;
    fill_disk(rank, true)?;
    // Others learn of it before their next exchange.
    let passed = run.pass(50, true).and_then(|()| Ok(run.fsdp.clip_grad_norm_(1.0).map(drop)?));
    is_told(rank, "a backward pass", passed)?;
    fill_disk(rank, false)?;
    run.opt.zero_grad()?;

    let mut other = Run::new(&group, &on_disk)?;
    other.pass(0, true)?;
    fill_disk(rank, true)?;
    is_told(rank, "a step's state", other.opt.step().map_err(Into::into))?;
    fill_disk(rank, false)?;
    same(&other.rows(), &Run::new(&group, &OffloadPolicy::None)?.rows()).context("nothing was stepped")?;
    run.step(1)?;
    plain.step(1)?;
    same(&run.rows(), &plain.rows()).context("with room again")?;

    // Whole parameters, whose optimizer's state is on disk.
    let weight = Tensor::ones([SIZE, SIZE], DOUBLE).set_requires_grad(true);
    let more = Tensor::ones([SIZE, SIZE], DOUBLE).set_requires_grad(true);
    let build = |params| {
        let opt = CpuOffloadOptimizer::new(params, adamw)?.state_on_disk(folder.path());
        Ok(opt.expect("a folder"))
    };
    let mut zero = ZeroRedundancyOptimizer::new([("weight", &weight), ("more", &more)], &group, build)?;
    (weight.sum(Kind::Double) + more.sum(Kind::Double)).backward();
    fill_disk(rank, true)?;
    is_told(rank, "a step of ZeRO-1", zero.step().map_err(Into::into))?;
    fill_disk(rank, false)?;
    ensure!(weight.equal(&weight.ones_like()) && more.equal(&more.ones_like()), "nothing was stepped");
    Ok(zero.step()?)
}

fn as_on_the_device(group: &ProcessGroup, policy: &OffloadPolicy) -> Result<()> {
    let (mut plain, mut offloaded) = (Run::new(group, &OffloadPolicy::None)?, Run::new(group, policy)?);
    for step in 0..3 {
        plain.step(step)?;
        offloaded.step(step)?;
        same(&plain.rows(), &offloaded.rows()).with_context(|| format!("step {step}"))?;
    }
    let ([_, one], [_, other]) = (plain.states()?, offloaded.states()?);
    same_state(&one, &other)?;
    // What one has saved, the other loads, whole or in parts.
    let mut loaded = Run::new(group, policy)?;
    let [model, opt] = plain.states()?;
    loaded.fsdp.load_state_dict(&model)?;
    loaded.opt.load_state_dict(&opt)?;
    plain.step(3)?;
    loaded.step(3)?;
    same(&plain.rows(), &loaded.rows()).context("after loading")?;
    let whole = offloaded.fsdp.consolidate_state_dict(0)?;
    ensure!(whole.is_some() == (group.rank() == 0));
    Ok(())
}

/// A folder that one rank lacks, and a policy that comes too late or differs by rank.
fn refusals(group: &ProcessGroup, on_disk: &OffloadPolicy) -> Result<()> {
    let weight = || Tensor::ones([8, 8], DOUBLE).set_requires_grad(true);
    let first = |policy: &OffloadPolicy| -> Result<ShardError> {
        let mut builder = FullyShardedDataParallel::builder(group)?.offload_policy(policy.clone());
        builder.unit("layer", [("weight", &weight())]).err().context("it was accepted")
    };
    let missing = OffloadPolicy::Disk("/nonexistent/rows".into());
    let policy = if group.rank() == 1 { &missing } else { on_disk };
    let error = first(policy)?;
    let text = error.to_string();
    ensure!(text.contains("/nonexistent/rows") && text.contains("should be a folder that exists"), "{text}");
    ensure!(group.rank() == 1 || matches!(error, ShardError::OtherRank { rank: 1, .. }), "{error:?}");
    let policy = if group.rank() == 1 { &OffloadPolicy::Cpu } else { on_disk };
    let text = first(policy)?.to_string();
    ensure!(text.contains("`offload_policy` is the host's memory on rank 1, but a folder on rank 0"), "{text}");
    let (one, other) = (weight(), weight());
    let mut builder = FullyShardedDataParallel::builder(group)?;
    let _unit = builder.unit("one", [("weight", &one)])?;
    let mut builder = builder.offload_policy(OffloadPolicy::Cpu);
    let text = builder.unit("other", [("weight", &other)]).err().context("it was accepted")?.to_string();
    ensure!(text.contains("`other`") && text.contains("another one than the first unit's"), "{text}");
    Ok(())
}
