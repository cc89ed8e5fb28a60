//! Checkpoints of each rank that another number of ranks loads, and another stage.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use overdrive_checkpoint::{Checkpoint, CheckpointError, Writers, consolidate};
use overdrive_core::{IntoParameters, Optimizer, OptimizerError, Parameter, StateDict, Stateful};
use overdrive_ddp::{DistributedDataParallel, ProcessGroup};
use overdrive_ffi::host_memory;
use overdrive_optim::AdamW;
use overdrive_shard::{DeviceMesh, FullyShardedDataParallel, ShardedDataParallel, ZeroRedundancyOptimizer};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

use crate::full::{Opt, Sharded};
use crate::harness::{Meeting, all_through, free_port, start};
use crate::model::{Model, close, data, same, same_state, step_alone, tensors};

pub const FOLDER: &str = "OVERDRIVE_TEST_FOLDER";

fn run(scenario: &str, ranks: usize) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let port = free_port();
    let vars = [(FOLDER, folder.path().to_str().context("a path in UTF-8")?)];
    let ranks = (0..ranks).map(|rank| start(scenario, rank, ranks, port, &vars)).collect::<Result<Vec<_>>>()?;
    let ended = all_through(ranks, Instant::now())?;
    ended.iter().for_each(|rank| print!("{}", rank.output));
    Ok(())
}

type Test = (&'static str, fn() -> Result<()>);

pub const TESTS: &[Test] = &[
    ("states_of_4_2_3_4_and_1_ranks_and_of_all_stages_are_the_same_to_the_bit", || run("resharded_stages", 4)),
    ("ranks_that_load_shards_of_others_need_memory_for_their_own", || run("resharded_memory", 4)),
    ("wrappers_of_sharded_optimizers_are_loaded_by_others_or_refused", || run("resharded_wrappers", 2)),
    ("slow_rows_of_a_lookahead_are_not_taken_from_rank_0", || run("resharded_slow_rows", 4)),
    ("shards_over_pairs_of_4_are_loaded_by_3_and_the_other_way_round", || run("resharded_hybrid", 4)),
    ("shards_of_another_model_are_an_error_on_every_rank", || run("resharded_other_model", 3)),
];

pub fn folder() -> Result<PathBuf> {
    Ok(PathBuf::from(std::env::var_os(FOLDER).context(FOLDER)?))
}

/// Without fused kernels, which compute the last elements of a tensor by other instructions: so the steps of rows are
/// those of the whole to the bit.
fn adamw(params: Vec<Parameter>) -> Result<Box<dyn Optimizer>, OptimizerError> {
    Ok(Box::new(AdamW::builder(params).lr(0.01).weight_decay(0.1).decay_groups().fused(false).build()?))
}

type Zero = ZeroRedundancyOptimizer<Box<dyn Optimizer>>;

/// A run of one of the stages.
pub enum Run {
    One { model: Model, opt: Zero },
    Two { model: Model, opt: Zero },
    Three { sharded: Sharded, opt: Opt },
}

impl Run {
    pub fn new(stage: usize, group: &ProcessGroup, seed: i64) -> Result<Self> {
        Ok(match stage {
            3 => {
                let sharded = Sharded::new(group, seed)?;
                let opt = sharded.fsdp.optimizer(adamw)?;
                Self::Three { sharded, opt }
            }
            _ => {
                let model = Model::new(seed);
                let opt = Zero::new(&model.vs, group, adamw)?;
                if stage == 1 { Self::One { model, opt } } else { Self::Two { model, opt } }
            }
        })
    }

    pub fn resume(&mut self, checkpoint: &mut Checkpoint) -> Result<Option<u64>, CheckpointError> {
        let (model, opt): (&mut dyn Stateful, &mut dyn Stateful) = match self {
            Self::One { model, opt } | Self::Two { model, opt } => (&mut model.vs, opt),
            Self::Three { sharded, opt } => (&mut sharded.fsdp, opt),
        };
        Ok(checkpoint.resume(&mut [("model", model), ("optimizer", opt)])?.map(|resumed| resumed.step))
    }

    pub fn save(&self, step: u64, checkpoint: &mut Checkpoint) -> Result<(), CheckpointError> {
        let (model, opt): (&dyn Stateful, &dyn Stateful) = match self {
            Self::One { model, opt } | Self::Two { model, opt } => (&model.vs, opt),
            Self::Three { sharded, opt } => (&sharded.fsdp, opt),
        };
        checkpoint.save(step, &[("model", model), ("optimizer", opt)])
    }

    /// Runs these steps with the same data on all ranks: over 1, 2 and 4 of them, means are these numbers to the bit.
    pub fn train(
        &mut self,
        group: &ProcessGroup,
        steps: std::ops::Range<u64>,
        mut after: impl FnMut(&Self, u64) -> Result<()>,
    ) -> Result<()> {
        let all_reduced = match self {
            Self::One { model, .. } => Some(DistributedDataParallel::new(&model.vs, group)?),
            _ => None,
        };
        let reduced = match self {
            Self::Two { opt, .. } => Some(ShardedDataParallel::new(opt)?),
            _ => None,
        };
        for step in steps {
            let batch = data(step as usize, 0, 0);
            match self {
                Self::Three { sharded, opt } => {
                    sharded.fsdp.backward(&sharded.loss(&batch)?)?;
                    opt.step()?;
                    opt.zero_grad()?;
                }
                Self::One { model, opt } | Self::Two { model, opt } => {
                    if let Some(ddp) = &all_reduced {
                        let loss = (ddp.forward(|| model.forward(&batch.0))? - &batch.1).square().mean(Kind::Double);
                        ddp.backward(&loss)?;
                    }
                    if let Some(reduced) = &reduced {
                        reduced.backward(&model.loss(&batch))?;
                    }
                    opt.step()?;
                    opt.zero_grad()?;
                }
            }
            after(self, step)?;
        }
        Ok(())
    }

    /// The whole states, on rank 0.
    fn whole(&self) -> Result<Option<(StateDict, StateDict)>> {
        let (model, opt) = match self {
            Self::One { model, opt } | Self::Two { model, opt } => {
                (Some(model.vs.state_dict()?), opt.consolidate_state_dict(0)?)
            }
            Self::Three { sharded, opt } => (sharded.fsdp.consolidate_state_dict(0)?, opt.consolidate_state_dict(0)?),
        };
        Ok(model.zip(opt))
    }
}

pub fn checkpoint(folder: &Path, group: &ProcessGroup) -> Result<Checkpoint> {
    Ok(Checkpoint::builder(folder).keep(2).ranks(group.clone(), Writers::Each).build()?)
}

/// A plain run of so many steps.
fn plain(steps: usize) -> Result<(StateDict, StateDict)> {
    let model = Model::new(1);
    let mut opt = adamw((&model.vs).into_parameters())?;
    (0..steps).try_for_each(|step| step_alone(&model, &mut *opt, &data(step, 0, 0), None))?;
    Ok((model.vs.state_dict()?, opt.as_stateful().context("a state")?.state_dict()?))
}

/// 4 ranks with stage 3, 2 with stage 1, 3 with stage 3, 4 with stage 2, 1 with stage 1: each has the states that the one
/// before has saved, to the bit. As far as means are exact, those are a plain run's.
pub fn stages(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let folder = folder()?;
    let ways: [(&[usize], usize); 5] =
        [(&[0, 1, 2, 3], 3), (&[0, 1], 1), (&[0, 1, 2], 3), (&[0, 1, 2, 3], 2), (&[0], 1)];
    let mut expected: Option<(StateDict, StateDict)> = None;
    for (number, (ranks, stage)) in ways.into_iter().enumerate() {
        let number = number as u64;
        if let Some(own) = group.new_group(ranks)? {
            let what = format!("{} ranks, stage {stage}", ranks.len());
            let mut run = Run::new(stage, &own, 1 + number as i64)?;
            let mut checkpoint = checkpoint(&folder, &own)?;
            let resumed = run.resume(&mut checkpoint).with_context(|| what.clone())?;
            ensure!(resumed == (number > 0).then_some(3 * number), "{what}: {resumed:?}");
            if let (Some(found), Some(expected)) = (run.whole()?, &expected) {
                same_state(&found.0, &expected.0).with_context(|| what.clone())?;
                same_state(&found.1, &expected.1).with_context(|| what.clone())?;
            }
            run.train(&own, 3 * number..3 * (number + 1), |_, _| Ok(()))?;
            run.save(3 * (number + 1), &mut checkpoint)?;
            checkpoint.finish()?;
            if let Some(whole) = run.whole()? {
                let alone = plain(3 * (number as usize + 1))?;
                if number < 2 {
                    same_state(&whole.0, &alone.0).with_context(|| what.clone())?;
                    same_state(&whole.1, &alone.1).with_context(|| what.clone())?;
                }
                close(&tensors(&whole.0), &tensors(&alone.0)).with_context(|| what.clone())?;
                expected = Some((whole.0.copied()?, whole.1.copied()?));
            }
        }
        group.barrier()?;
    }
    if group.rank() == 0 {
        // One file of the last, in which other programs find the weights.
        let file = folder.join("model.safetensors");
        consolidate(&folder, None, "model", &file)?;
        let mut vs = Model::new(9).vs;
        vs.load(&file)?;
        same(&tensors(&vs.state_dict()?), &tensors(&expected.context("a state")?.0))?;
    }
    Ok(())
}

const SIZE: i64 = 256;
const BLOCKS: usize = 24;

/// AdamW over blocks of equal size, which no rank ever has whole.
struct Large {
    fsdp: FullyShardedDataParallel,
    opt: overdrive_shard::FullyShardedOptimizer<AdamW>,
}

impl Large {
    fn new(group: &ProcessGroup) -> Result<Self> {
        let vs = nn::VarStore::new(Device::Cpu);
        let mut builder = FullyShardedDataParallel::builder(group)?;
        for number in 0..BLOCKS {
            let block = nn::linear(vs.root() / format!("block{number}"), SIZE, SIZE, Default::default());
            let bias = block.bs.as_ref().map(Tensor::shallow_clone).unwrap_or_default();
            let unit = builder.unit(&format!("block{number}"), [("weight", &block.ws), ("bias", &bias)])?;
            if number == 0 {
                let inputs = Tensor::ones([1, SIZE], (Kind::Float, Device::Cpu));
                drop(unit.forward(inputs, |x| block.forward(&x)).err());
            }
        }
        let fsdp = builder.build(&vs)?;
        let opt = fsdp.optimizer(|params| AdamW::builder(params).lr(1e-3).build())?;
        Ok(Self { fsdp, opt })
    }

    /// A step with gradients of ones, so that there is a state.
    fn step(&mut self) -> Result<()> {
        for param in self.fsdp.parameters() {
            overdrive_ffi::set_grad(param.tensor(), Some(&param.tensor().detach().ones_like()))?;
        }
        self.opt.step()?;
        Ok(self.opt.zero_grad()?)
    }

    /// The bytes that resuming takes at its peak, beside what was there.
    fn resumes(&mut self, checkpoint: &mut Checkpoint) -> Result<usize> {
        host_memory::reset_peak()?;
        let before = host_memory::stats()?.allocated;
        let parts: &mut [(&str, &mut dyn Stateful)] = &mut [("model", &mut self.fsdp), ("optimizer", &mut self.opt)];
        ensure!(checkpoint.resume(parts)?.is_some_and(|resumed| resumed.step == 1));
        Ok((host_memory::stats()?.peak - before) as usize)
    }
}

/// 4 ranks that load what 2 have saved need no more memory than where they load what 4 have saved.
pub fn memory(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let folder = folder()?;
    let whole = 3 * 4 * BLOCKS * (SIZE * SIZE + SIZE) as usize;
    if let Some(pair) = group.new_group(&[0, 1])? {
        let mut large = Large::new(&pair)?;
        large.step()?;
        let mut checkpoint = checkpoint(&folder.join("of_2"), &pair)?;
        checkpoint.save(1, &[("model", &large.fsdp), ("optimizer", &large.opt)])?;
        checkpoint.finish()?;
    }
    group.barrier()?;
    host_memory::count(usize::MAX)?;
    let mut large = Large::new(&group)?;
    let of_2 = large.resumes(&mut checkpoint(&folder.join("of_2"), &group)?)?;
    let mut again = checkpoint(&folder.join("of_4"), &group)?;
    again.save(1, &[("model", &large.fsdp), ("optimizer", &large.opt)])?;
    again.finish()?;
    drop(large);
    let mut large = Large::new(&group)?;
    let of_4 = large.resumes(&mut checkpoint(&folder.join("of_4"), &group)?)?;
    println!("the whole state has {whole} bytes; loading a quarter took {of_4} more at most, of 2 ranks {of_2}");
    ensure!(of_2 <= of_4 + (1 << 20), "{of_2} bytes, and {of_4} of as many ranks");
    ensure!(of_2 < whole / 2, "{of_2} bytes, of {whole}");
    Ok(())
}

/// Pairs have the same rows: each row is read once.
pub fn hybrid(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let folder = folder()?;
    let pairs = |seed: i64| -> Result<Run> {
        let mesh = DeviceMesh::new(&group, &[("replicate", 2), ("shard", 2)])?;
        let part = mesh.group("shard")?;
        let builder = FullyShardedDataParallel::hybrid(&mesh, "replicate", "shard")?;
        let sharded = Sharded::over(builder, seed, &[1, 2], (part.rank(), part.size()))?;
        let opt = sharded.fsdp.optimizer(adamw)?;
        Ok(Run::Three { sharded, opt })
    };
    let mut run = pairs(1)?;
    run.train(&group, 0..3, |_, _| Ok(()))?;
    run.save(3, &mut checkpoint(&folder, &group)?)?;
    let expected = run.whole()?;
    if let Some(three) = group.new_group(&[0, 1, 2])? {
        let mut other = Run::new(3, &three, 2)?;
        let mut checkpoint = checkpoint(&folder, &three)?;
        ensure!(other.resume(&mut checkpoint)? == Some(3));
        if let (Some(found), Some(expected)) = (other.whole()?, &expected) {
            same_state(&found.0, &expected.0)?;
            same_state(&found.1, &expected.1)?;
        }
        other.save(4, &mut checkpoint)?;
        checkpoint.finish()?;
    }
    group.barrier()?;
    let mut again = pairs(3)?;
    ensure!(again.resume(&mut checkpoint(&folder, &group)?)? == Some(4));
    if let (Some(found), Some(expected)) = (again.whole()?, &expected) {
        same_state(&found.0, &expected.0)?;
        same_state(&found.1, &expected.1)?;
    }
    // As many ranks, with other parts than before.
    let mut other = Run::new(3, &group, 4)?;
    ensure!(other.resume(&mut checkpoint(&folder, &group)?)? == Some(4));
    if let (Some(found), Some(expected)) = (other.whole()?, &expected) {
        same_state(&found.0, &expected.0)?;
    }
    Ok(())
}

/// Parameters of other shapes, or others: refused before anything changes, by 2 of 3 ranks and by all with another stage.
pub fn other_model(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let folder = folder()?;
    let save = |name: &str, model: &dyn Stateful, opt: &dyn Stateful, group: &ProcessGroup| -> Result<()> {
        let mut checkpoint = checkpoint(&folder.join(name), group)?;
        checkpoint.save(1, &[("model", model), ("optimizer", opt)])?;
        Ok(checkpoint.finish()?)
    };
    let step = |params: Vec<Parameter>, opt: &mut dyn Optimizer| -> Result<()> {
        for param in params {
            overdrive_ffi::set_grad(param.tensor(), Some(&param.tensor().detach().ones_like()))?;
        }
        Ok(opt.step()?)
    };
    // Another size, and another name.
    for (name, label) in [("sizes", "layer1.weight"), ("names", "head.weight")] {
        let vs = nn::VarStore::new(Device::Cpu);
        let _ = nn::linear(vs.root() / label.split_once('.').map_or("", |it| it.0), 9, 4, Default::default());
        let mut vs = vs;
        vs.double();
        let fsdp = FullyShardedDataParallel::builder(&group)?.build(&vs)?;
        let mut opt: Opt = fsdp.optimizer(adamw)?;
        step(fsdp.parameters(), &mut opt)?;
        save(name, &fsdp, &opt, &group)?;
        for (stage, ranks) in [(3, vec![0, 1]), (1, vec![0, 1]), (1, vec![0, 1, 2])] {
            let Some(own) = group.new_group(&ranks)? else { continue };
            let mut run = Run::new(stage, &own, 1)?;
            let before = run.whole()?.map(|(model, _)| model.copied()).transpose()?;
            let told = run.resume(&mut checkpoint(&folder.join(name), &own)?).err().context("it was loaded")?;
            ensure!(matches!(&told, CheckpointError::Part { .. } | CheckpointError::OtherRank { .. }), "{told:?}");
            if let (Some((now, _)), Some(before)) = (run.whole()?, &before) {
                ensure!(matches!(told, CheckpointError::Part { .. }), "{told}");
                same_state(&now, before)?;
            }
        }
        group.barrier()?;
    }
    Ok(())
}
