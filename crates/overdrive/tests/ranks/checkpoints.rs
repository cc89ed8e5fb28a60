//! A rank is killed while checkpoints are written: the others get an error, and every checkpoint can be loaded.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use overdrive::prelude::*;
use overdrive_ddp::DistributedDataParallel;
use tch::nn::{self, Module};

use crate::harness::{Meeting, PATIENCE};
use crate::moments::{self, doing, drawn, short, told};

pub fn killed_while_saving() -> Result<()> {
    moments::kill("killed_saving", 12, Duration::from_millis(400), loads)
}

struct Run {
    vs: nn::VarStore,
    model: nn::Sequential,
    opt: AdamW,
}

fn start() -> Result<Run> {
    tch::manual_seed(1);
    let vs = nn::VarStore::new(Device::Cpu);
    let model = nn::seq()
        .add(nn::linear(vs.root() / "in", 64, 1024, Default::default()))
        .add_fn(Tensor::tanh)
        .add(nn::linear(vs.root() / "out", 1024, 64, Default::default()));
    let opt = AdamW::builder(vs.trainable_variables()).lr(1e-3).build()?;
    Ok(Run { vs, model, opt })
}

/// Each rank saves after every step, in its own folder.
pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group_with(PATIENCE, false)?;
    let mut run = start()?;
    let ddp = DistributedDataParallel::new(&run.vs, &group)?;
    group.barrier()?;
    group.set_timeout(short()?)?;
    let folder = crate::folder()?.join(format!("rank{}", group.rank()));
    let background = drawn()?.is_multiple_of(2);
    let mut checkpoint = Checkpoint::builder(folder).every(1).keep(2).background(background).build()?;
    let inputs = Tensor::randn([8, 64], (Kind::Float, Device::Cpu));
    for step in 1.. {
        doing(if background { "training while a checkpoint is written" } else { "training" })?;
        let trained = ddp.forward(|| run.model.forward(&inputs));
        let trained = trained.and_then(|outputs| ddp.backward(&outputs.square().mean(Kind::Float)));
        if let Err(error) = trained {
            checkpoint.finish()?;
            return told(&error, " on rank");
        }
        run.opt.step()?;
        run.opt.zero_grad()?;
        doing("saving")?;
        checkpoint.save(step, &[("model", &run.vs), ("optimizer", &run.opt)])?;
    }
    Ok(())
}

/// Checks that the newest checkpoint of every rank, including the killed one, is undamaged.
fn loads(folder: &Path) -> Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if !path.is_dir() {
            continue;
        }
        let mut run = start()?;
        let mut checkpoint = Checkpoint::builder(&path).build()?;
        let resumed = checkpoint.resume(&mut [("model", &mut run.vs), ("optimizer", &mut run.opt)]);
        let resumed = resumed.with_context(|| path.display().to_string())?;
        ensure!(resumed.as_ref().is_none_or(|it| it.skipped.is_empty()), "a kill has damaged {resumed:?}");
    }
    Ok(())
}
