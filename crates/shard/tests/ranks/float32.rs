//! Every stage in float32 beside one process with the large batch: gradients of the first step, and losses of 20 steps.

use anyhow::{Context, Result, ensure};
use overdrive_accum::{Accumulator, Samples};
use overdrive_amp::GradScaler;
use overdrive_core::{GradientSync, IntoParameters, Optimizer};
use overdrive_ddp::{DistributedDataParallel, ProcessGroup};
use overdrive_optim::clip_grad_norm_;
use overdrive_shard::{DeviceMesh, FullyShardedDataParallel, ShardedDataParallel, ZeroRedundancyOptimizer};
use tch::{Device, Kind, Tensor};

use crate::full::{Sharded, rows_of};
use crate::harness::Meeting;
use crate::model::{Model, SAMPLES, data, large_batch, step_alone};
use crate::zero::adamw;

const STEPS: usize = 20;
/// Of the norm of all gradients.
const GRADIENTS: f64 = 1e-6;
/// Of the loss.
const LOSSES: f64 = 1e-5;

type Batch = (Tensor, Tensor);

fn float(batch: Batch) -> Batch {
    (batch.0.to_kind(Kind::Float), batch.1.to_kind(Kind::Float))
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Plain,
    Accumulated,
    Clipped,
    Scaled,
}

/// A model over ranks, by stage.
enum Run {
    One(Model, DistributedDataParallel),
    Two(Model, ShardedDataParallel),
    Three(Sharded, (usize, usize)),
}

impl Run {
    /// `mesh`: the sizes of a hybrid one, with stage 3.
    fn new(group: &ProcessGroup, stage: usize, mesh: Option<[usize; 2]>) -> Result<(Self, Box<dyn Optimizer>)> {
        let model = Model::float(1 + group.rank() as i64);
        if stage == 3 {
            let (builder, part) = match mesh {
                Some([hosts, ranks]) => {
                    let mesh = DeviceMesh::new(group, &[("replicate", hosts), ("shard", ranks)])?;
                    let part = (mesh.coordinate()[1], ranks);
                    (FullyShardedDataParallel::hybrid(&mesh, "replicate", "shard")?, part)
                }
                None => (FullyShardedDataParallel::builder(group)?, (group.rank(), group.size())),
            };
            let sharded = Sharded::of(model, builder, &[1, 2], part)?;
            let opt = Box::new(sharded.fsdp.optimizer(adamw)?);
            return Ok((Self::Three(sharded, part), opt));
        }
        let mut opt = Box::new(ZeroRedundancyOptimizer::new(&model.vs, group, adamw)?);
        let run = match stage {
            1 => {
                let ddp = DistributedDataParallel::new(&model.vs, group)?;
                Self::One(model, ddp)
            }
            _ => {
                let sharded = ShardedDataParallel::new(&mut opt)?;
                Self::Two(model, sharded)
            }
        };
        Ok((run, opt))
    }

    fn sync(&self) -> &dyn GradientSync {
        match self {
            Self::One(_, ddp) => ddp,
            Self::Two(_, sharded) => sharded,
            Self::Three(sharded, _) => &sharded.fsdp,
        }
    }

    fn loss(&self, batch: &Batch) -> Result<Tensor> {
        Ok(match self {
            Self::One(model, ddp) => ddp.forward(|| model.loss(batch))?,
            Self::Two(model, _) => model.loss(batch),
            Self::Three(sharded, _) => sharded.loss(batch)?,
        })
    }

    fn clip(&self, max_norm: f64) -> Result<()> {
        match self {
            Self::One(model, _) => drop(clip_grad_norm_(&model.vs, max_norm)?),
            Self::Two(_, sharded) => drop(sharded.clip_grad_norm_(max_norm)?),
            Self::Three(sharded, _) => drop(sharded.fsdp.clip_grad_norm_(max_norm)?),
        }
        Ok(())
    }

    /// This rank's gradients, and what they should be by those of the whole model.
    fn gradients(&self, opt: &dyn Optimizer, whole: &Model) -> Result<Vec<(Tensor, Tensor)>> {
        let part = if let Self::Three(_, part) = self { *part } else { (0, 1) };
        let whole = whole.vs.variables().into_iter().map(|(name, it)| (name, it.grad())).collect::<Vec<_>>();
        let expected = rows_of(part, &whole);
        let mut pairs = Vec::new();
        for param in opt.parameters() {
            let (name, grad) = (param.name().context("a name")?, param.tensor().grad());
            let expected = expected.iter().find(|(it, _)| it == name);
            if let (true, Some((_, expected))) = (grad.defined(), expected) {
                pairs.push((grad, expected.shallow_clone()));
            }
        }
        Ok(pairs)
    }
}

/// The sum over ranks.
fn sum(group: &ProcessGroup, own: f64) -> Result<f64> {
    Ok(group.all_gather_object(&own)?.iter().sum())
}

fn gradients_are_close(group: &ProcessGroup, pairs: &[(Tensor, Tensor)]) -> Result<()> {
    let square = |it: &Tensor| it.to_kind(Kind::Double).square().sum(Kind::Double).double_value(&[]);
    let total = |of: &dyn Fn(&(Tensor, Tensor)) -> f64| sum(group, pairs.iter().map(of).sum());
    let off = total(&|(found, expected)| square(&(found - expected)))?.sqrt();
    let norm = total(&|(_, expected)| square(expected))?.sqrt();
    ensure!(norm > 0.0 && off <= GRADIENTS * norm, "gradients are off by {off:e} of {norm:e}");
    Ok(())
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    // 4 ranks: pairs of them.
    let stages = match group.size() {
        4 => vec![(3, Some([2, 2]))],
        _ => vec![(1, None), (2, None), (3, None)],
    };
    for (stage, mesh) in stages {
        for way in [Way::Plain, Way::Accumulated, Way::Clipped, Way::Scaled] {
            trains(&group, stage, mesh, way).with_context(|| format!("stage {stage}, {mesh:?}, {way:?}"))?;
        }
    }
    Ok(())
}

fn trains(group: &ProcessGroup, stage: usize, mesh: Option<[usize; 2]>, way: Way) -> Result<()> {
    let (rank, ranks, alone) = (group.rank(), group.size(), Model::float(1));
    let (run, mut opt) = Run::new(group, stage, mesh)?;
    let mut single = adamw((&alone.vs).into_parameters())?;
    let micro_batches = if way == Way::Accumulated { 3 } else { 1 };
    let max_norm = (way == Way::Clipped).then_some(0.5);
    let mut scaler = GradScaler::builder(Device::Cpu).enabled(way == Way::Scaled).init_scale(1024.0).build()?;
    for step in 0..STEPS {
        let mut accum = Accumulator::new(micro_batches)?.with_sync(run.sync());
        let mut own = 0.0;
        for micro in 0..micro_batches {
            let loss = run.loss(&float(data(step, micro, rank)))?;
            own += loss.double_value(&[]) / (micro_batches * ranks) as f64;
            accum.backward(&*opt, &scaler.scale(&loss)?, Samples(SAMPLES), micro + 1 == micro_batches)?;
        }
        let batch = float(large_batch(step, micro_batches, ranks));
        let (found, expected) = (sum(group, own)?, alone.loss(&batch).double_value(&[]));
        ensure!((found - expected).abs() <= LOSSES * expected, "step {step}: a loss of {found}, not {expected}");
        scaler.unscale_(&mut *opt)?;
        if step == 0 {
            alone.loss(&batch).backward();
            gradients_are_close(group, &run.gradients(&*opt, &alone)?)?;
            single.zero_grad()?;
        }
        if let Some(max_norm) = max_norm {
            run.clip(max_norm)?;
        }
        ensure!(!scaler.step(&mut *opt)?.skipped()?);
        scaler.update()?;
        opt.zero_grad()?;
        step_alone(&alone, &mut *single, &batch, max_norm)?;
    }
    Ok(())
}
