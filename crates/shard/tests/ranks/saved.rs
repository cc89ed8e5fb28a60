//! Sharded training that is resumed from a checkpoint, each rank from its own.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use overdrive_checkpoint::{Checkpoint, CheckpointError, Writers};
use overdrive_core::{OptimizerError, Parameter};
use overdrive_ddp::ProcessGroup;
use overdrive_optim::{AdamW, Lookahead};
use overdrive_shard::{ShardedDataParallel, ZeroRedundancyOptimizer};

use crate::harness::{Meeting, all_through, free_port, start};
use crate::model::{Model, data, same};

const FOLDER: &str = "OVERDRIVE_TEST_FOLDER";

pub fn run() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let port = free_port();
    let vars = [(FOLDER, folder.path().to_str().context("a path in UTF-8")?)];
    let ranks = (0..2).map(|rank| start("saved", rank, 2, port, &vars)).collect::<Result<Vec<_>>>()?;
    all_through(ranks, Instant::now()).map(drop)
}

type Zero = ZeroRedundancyOptimizer<Lookahead<AdamW>>;

struct Run {
    model: Model,
    opt: Zero,
}

impl Run {
    fn new(seed: i64, group: &ProcessGroup) -> Result<Self> {
        let build = |params: Vec<Parameter>| -> Result<_, OptimizerError> {
            Lookahead::new(AdamW::builder(params).lr(0.01).build()?, 2, 0.5)
        };
        let model = Model::new(seed);
        let opt = Zero::new(&model.vs, group, build)?;
        Ok(Self { model, opt })
    }

    fn train(&mut self, sharded: &ShardedDataParallel, steps: std::ops::Range<usize>) -> Result<()> {
        use overdrive_core::Optimizer;
        for step in steps {
            sharded.backward(&self.model.loss(&data(step, 0, sharded.group().rank())))?;
            self.opt.step()?;
            self.opt.zero_grad()?;
        }
        Ok(())
    }
}

/// Slow weights, too, are those that were saved, whatever is built after them.
pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let folder = PathBuf::from(std::env::var_os(FOLDER).context(FOLDER)?);
    let mut run = Run::new(1, &group)?;
    let sharded = ShardedDataParallel::new(&mut run.opt)?;
    run.train(&sharded, 0..3)?;
    let mut first = Checkpoint::builder(folder.join("first")).ranks(group.clone(), Writers::First).build()?;
    let told = first.save(3, &[("optimizer", &run.opt)]);
    ensure!(matches!(&told, Err(CheckpointError::OwnOfRank { part }) if part == "optimizer"), "{told:?}");
    let each = || Checkpoint::builder(folder.join("each")).ranks(group.clone(), Writers::Each).build();
    let mut checkpoint = each()?;
    checkpoint.save(3, &[("model", &run.model.vs), ("optimizer", &run.opt)])?;
    checkpoint.finish()?;
    run.train(&sharded, 3..6)?;
    drop(sharded);

    let mut resumed = Run::new(2, &group)?;
    let parts: &mut [(&str, &mut dyn overdrive_core::Stateful)] =
        &mut [("model", &mut resumed.model.vs), ("optimizer", &mut resumed.opt)];
    ensure!(each()?.resume(parts)?.is_some_and(|found| found.step == 3));
    let sharded = ShardedDataParallel::new(&mut resumed.opt)?;
    resumed.train(&sharded, 3..6)?;
    same(&resumed.model.values(), &run.model.values())
}
