//! Sparse gradients, averaged over Gloo.

use anyhow::{Context, Result, bail, ensure};
use overdrive_ddp::{DdpError, DistributedDataParallel, GradBucket, ProcessGroup, Work};
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;

const ROWS: i64 = 7;

/// The rows that a rank looks up; some twice, some by several ranks, one by nobody.
fn used(step: usize, rank: usize) -> Tensor {
    let all = [[0, 2, 2, 5], [1, 2, 3, 1], [4, 4, 5, 0]];
    Tensor::from_slice(&all[(step + rank) % 3])
}

fn loss(table: &Tensor, linear: &Tensor, rows: &Tensor) -> Tensor {
    Tensor::embedding(table, rows, -1, false, true).matmul(linear).square().mean(table.kind())
}

fn model(kind: Kind) -> (Tensor, Tensor) {
    tch::manual_seed(3);
    let of = |size: &[i64]| Tensor::randn(size, (kind, Device::Cpu)).set_requires_grad(true);
    (of(&[ROWS, 4]), of(&[4, 3]))
}

fn named(table: &Tensor, linear: &Tensor) -> Vec<(String, Tensor)> {
    vec![("table".to_owned(), table.shallow_clone()), ("linear".to_owned(), linear.shallow_clone())]
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    for kind in [Kind::Float, Kind::Double] {
        equals_the_mean(&group, kind)?;
    }
    refusals(&group)
}

/// The mean over ranks of the dense gradients, in one pass and in a window of two.
fn equals_the_mean(group: &ProcessGroup, kind: Kind) -> Result<()> {
    let (table, linear) = model(kind);
    let ddp = DistributedDataParallel::builder(group)
        .sparse_gradients(["table"])
        .build_from(named(&table, &linear), vec![])?;
    for step in 0..4 {
        let passes = 1 + step % 2;
        let (mut table, mut linear) = (table.shallow_clone(), linear.shallow_clone());
        table.zero_grad();
        linear.zero_grad();
        for pass in 0..passes {
            let rows = used(step + pass, group.rank());
            let _local = (pass + 1 < passes).then(|| ddp.no_sync());
            ddp.backward(&ddp.forward(|| loss(&table, &linear, &rows))?)?;
        }
        let (own, weights) = model(kind);
        let parts = (0..group.size()).flat_map(|rank| (0..passes).map(move |pass| used(step + pass, rank)));
        let sum =
            parts.map(|rows| loss(&own, &weights, &rows)).fold(Tensor::zeros([], (kind, Device::Cpu)), |a, b| a + b);
        (sum / group.size() as f64).backward();
        ensure!(table.grad().is_sparse() && !linear.grad().is_sparse());
        for (found, expected) in
            [(table.grad().to_dense(None, false), own.grad().to_dense(None, false)), (linear.grad(), weights.grad())]
        {
            ensure!(
                found.allclose(&expected, 1e-5, 1e-6, false),
                "{kind:?}, step {step}: {found} instead of {expected}"
            );
        }
    }
    Ok(())
}

fn refusals(group: &ProcessGroup) -> Result<()> {
    let (table, linear) = model(Kind::Float);
    let builder = || DistributedDataParallel::builder(group);
    let unknown = builder().sparse_gradients(["other"]).build_from(named(&table, &linear), vec![]);
    ensure!(matches!(unknown, Err(DdpError::InvalidOption { option: "sparse_gradients", .. })), "{unknown:?}");
    let ddp = builder().sparse_gradients(["table"]).build_from(named(&table, &linear), vec![])?;
    let hook = |_: &GradBucket| -> Result<Work<Tensor>, DdpError> { Err(DdpError::NoParameters) };
    let refused = ddp.register_comm_hook(hook).err().context("a hook would get a sparse bucket")?;
    ensure!(refused.to_string().contains("sparse gradients are averaged without hooks"), "{refused}");
    ensure!(ddp.register_fp16_compress().is_err() && ddp.join(false, || ()).is_err());
    drop(ddp);
    // Unless it is named, the error says what to do.
    let ddp = builder().build_from(named(&table, &linear), vec![])?;
    let loss = ddp.forward(|| loss(&table, &linear, &used(0, group.rank())))?;
    let error = ddp.backward(&loss).err().context("a sparse gradient was averaged")?;
    let DdpError::SparseGradient { name } = &error else { bail!("{error}") };
    ensure!(name == "table" && error.to_string().contains("name it in `sparse_gradients`"), "{error}");
    Ok(())
}
