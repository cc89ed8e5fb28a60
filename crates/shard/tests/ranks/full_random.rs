//! Random sequences of passes, steps and failures, the same on all ranks, beside one process: nothing waits forever, and
//! gradients and rows stay those of the large batch.

use anyhow::{Context, Result, ensure};
use overdrive_core::{IntoParameters, Optimizer};
use overdrive_ddp::ProcessGroup;
use overdrive_shard::ShardError;
use tch::{Kind, Tensor};

use crate::full::{Opt, Sharded};
use crate::harness::Meeting;
use crate::model::{Model, data, large_batch};
use crate::zero::sgd;

const OPERATIONS: usize = 150;

/// Numbers that look random (Knuth's constants).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }
}

#[derive(Clone, Copy, Debug)]
enum Failure {
    None,
    /// The rank leaves its forward before this layer.
    Forward {
        rank: usize,
        layer: usize,
    },
    /// The rank's loss has no graph.
    Loss {
        rank: usize,
    },
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    for seed in 0..3u64 {
        let mut numbers = Numbers(seed);
        let units: Vec<usize> = (0..4).filter(|_| numbers.below(3) > 0).collect();
        let reshards = numbers.below(2) == 0;
        let sharded = Sharded::with(&group, 1, &units, |builder| builder.reshard_after_forward(reshards))?;
        run(&group, &sharded, &mut numbers).with_context(|| format!("seed {seed}, units {units:?}, {reshards}"))?;
    }
    Ok(())
}

fn run(group: &ProcessGroup, sharded: &Sharded, numbers: &mut Numbers) -> Result<()> {
    let mut opt: Opt = sharded.fsdp.optimizer(sgd)?;
    let alone = Model::new(1);
    let mut single = sgd((&alone.vs).into_parameters())?;
    // The last pass has left gradients local.
    let mut is_local = false;
    for step in 0..OPERATIONS {
        let operation = numbers.below(10);
        let place = || format!("operation {step}: {operation}");
        match operation {
            0..=3 => {
                let failure = match numbers.below(6) {
                    0 => Failure::Forward { rank: numbers.below(group.size()), layer: numbers.below(4) },
                    1 => Failure::Loss { rank: numbers.below(group.size()) },
                    _ => Failure::None,
                };
                let holds = numbers.below(3) == 0;
                let held = holds.then(|| sharded.fsdp.no_sync());
                let told = pass(sharded, step, failure);
                drop(held);
                match failure {
                    Failure::None => {
                        told.with_context(place)?;
                        alone.loss(&large_batch(step, 1, group.size())).backward();
                        is_local = holds;
                        if !is_local {
                            sharded.gradients_close_to(&alone).with_context(place)?;
                        }
                    }
                    Failure::Forward { rank, .. } | Failure::Loss { rank } => {
                        let is_named =
                            matches!(&told, Err(ShardError::OtherRank { rank: found, .. }) if *found == rank);
                        ensure!(
                            told.is_err() && (is_named || group.rank() == rank),
                            "{}, {failure:?}: {told:?}",
                            place()
                        );
                        let is_freed = |tensor: &Tensor| !tensor.grad().defined();
                        let wholes = sharded.model.vs.variables();
                        ensure!(opt.params().iter().chain(wholes.values()).all(is_freed), "{}: gradients", place());
                        single.zero_grad()?;
                        is_local = false;
                    }
                }
            }
            4 | 5 => {
                let _loss = tch::no_grad(|| sharded.loss(&data(step, 0, group.rank()))).with_context(place)?;
            }
            // A graph that no pass runs.
            6 => drop(sharded.loss(&data(step, 0, group.rank())).with_context(place)?),
            7 => {
                opt.zero_grad()?;
                single.zero_grad()?;
                is_local = false;
            }
            8 => {
                let told = sharded.fsdp.clip_grad_norm_(1e6).map(drop);
                ensure!(told.is_err() == is_local, "{}: {told:?}", place());
            }
            _ => {
                let told = opt.step();
                ensure!(told.is_err() == is_local, "{}: {told:?}", place());
                if !is_local {
                    single.step()?;
                    sharded.close_to(&alone).with_context(place)?;
                }
                opt.zero_grad()?;
                single.zero_grad()?;
                is_local = false;
            }
        }
    }
    Ok(())
}

fn pass(sharded: &Sharded, step: usize, failure: Failure) -> Result<(), ShardError> {
    let rank = sharded.fsdp.process_group().rank();
    let (inputs, targets) = data(step, 0, rank);
    let outputs = sharded.fsdp.try_forward(inputs, |x| {
        (0..4).try_fold(x, |x, number| match failure {
            Failure::Forward { rank: of, layer } if of == rank && layer == number => {
                Err(ShardError::Unit { name: "mine".to_owned(), reason: "a failure of the test".to_owned() })
            }
            _ => sharded.layer(number, x),
        })
    })?;
    let loss = (outputs - targets).square().mean(Kind::Double);
    let is_without = matches!(failure, Failure::Loss { rank: of } if of == rank);
    sharded.fsdp.backward(&if is_without { Tensor::from(1.0) } else { loss })
}
