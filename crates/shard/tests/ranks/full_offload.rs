//! ZeRO-3 whose rows, gradients and state are in host memory or in files.

use anyhow::{Context, Result, ensure};
use overdrive_core::{Optimizer, Parameter, StateDict, Stateful};
use overdrive_ddp::ProcessGroup;
use overdrive_shard::{FullyShardedDataParallel, FullyShardedOptimizer, OffloadPolicy, ShardError, ShardedUnit};
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;
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
