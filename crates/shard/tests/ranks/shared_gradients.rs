//! Gradients whose memory autograd hands to several nodes of the graph: averaging one leaves the others as they are.

use anyhow::{Context, Result, ensure};
use overdrive_ddp::ProcessGroup;
use overdrive_shard::{FullyShardedDataParallel, ShardedDataParallel, ZeroRedundancyOptimizer};
use tch::{Kind, Tensor};

use crate::harness::Meeting;
use crate::model::{DOUBLE, close};
use crate::zero::sgd;

/// Two tensors of it have over 1 MiB each, in rows that 2, 3 and 4 ranks share evenly.
const SHAPE: [i64; 2] = [384, 400];

fn values(seed: i64) -> Tensor {
    tch::manual_seed(seed);
    Tensor::randn(SHAPE, DOUBLE)
}

fn parameter(seed: i64) -> Tensor {
    values(seed).set_requires_grad(true)
}

/// What each rank's loss is multiplied by, and the mean over ranks.
fn weights(group: &ProcessGroup) -> (Tensor, Tensor) {
    let of = |rank: usize| values(100 + rank as i64);
    let sum = (0..group.size()).map(of).fold(Tensor::zeros(SHAPE, DOUBLE), |sum, it| sum + it);
    (of(group.rank()), sum / group.size() as f64)
}

type Forward = fn(&[Tensor; 2]) -> Tensor;

/// Both have the gradient of the sum.
const SUMS: [(&str, Forward); 4] = [
    ("a branch that is taken first", |[p, q]| (p * 1.0).unsqueeze(0) + q.unsqueeze(0)),
    ("views", |[p, q]| p.view([-1]) + q.view([-1])),
    ("transposed", |[p, q]| p.tr() + q.tr()),
    ("unsqueezed", |[p, q]| p.unsqueeze(0) + q.unsqueeze(0)),
];

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let (own, mean) = weights(&group);
    for (name, forward) in SUMS {
        for is_swapped in [false, true] {
            let params = [parameter(1), parameter(2)];
            let given = if is_swapped { [&params[1], &params[0]] } else { [&params[0], &params[1]] };
            let mut opt = ZeroRedundancyOptimizer::new(given, &group, sgd)?;
            let sharded = ShardedDataParallel::new(&mut opt)?;
            let outputs = forward(&params);
            let outputs = if name == "transposed" { outputs.tr() } else { outputs.view(SHAPE) };
            sharded.backward(&(outputs * &own).sum(Kind::Double))?;
            let owners = opt.owners().to_vec();
            for (param, owner) in given.iter().zip(owners) {
                ensure!(param.grad().defined() == (owner == group.rank()), "{name}: gradients are at their owners");
                if owner == group.rank() {
                    close(&[(name.to_owned(), param.grad())], &[(name.to_owned(), mean.shallow_clone())])?;
                }
            }
        }
    }
    full(&group, &own, &mean)
}

/// The gradient of a unit's parameter is that of the unit's input, which the unit before still needs.
fn full(group: &ProcessGroup, own: &Tensor, mean: &Tensor) -> Result<()> {
    let (w, p) = (parameter(1), parameter(2));
    let mut builder = FullyShardedDataParallel::builder(group)?;
    let first = builder.unit("first", [("w", &w)])?;
    let second = builder.unit("second", [("p", &p)])?;
    let fsdp = builder.build([("w", &w), ("p", &p)])?;
    for _ in 0..2 {
        let outputs = fsdp.try_forward(values(3).unsqueeze(0), |x| {
            let x = first.forward(x, |x| x * w.unsqueeze(0))?;
            second.forward(x, |x| x + p.unsqueeze(0))
        })?;
        fsdp.backward(&(outputs * own).sum(Kind::Double))?;
        let rows = |whole: &Tensor| {
            let parts = whole.chunk(group.size() as i64, 0);
            parts.get(group.rank()).map(Tensor::shallow_clone).context("no part")
        };
        let found: Vec<_> = fsdp.parameters().iter().map(|it| (String::new(), it.tensor().grad())).collect();
        close(&found, &[(String::new(), rows(&(mean * values(3)))?), (String::new(), rows(mean)?)])?;
        fsdp.parameters().iter().try_for_each(|it| overdrive_ffi::set_grad(it.tensor(), None))?;
    }
    Ok(())
}
