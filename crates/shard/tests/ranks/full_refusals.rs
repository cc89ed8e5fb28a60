//! What cannot be sharded is a named error on every rank.

use anyhow::{Result, ensure};
use overdrive_core::{IntoParameters, Optimizer, OptimizerError, Parameter};
use overdrive_ddp::{DistributedDataParallel, ProcessGroup};
use overdrive_optim::{Adafactor, AdamW, AdamW8Bit, Lamb, Lars, Muon, Prodigy, Sam, Sgd};
use overdrive_shard::{FullyShardedDataParallel, ShardError};
use tch::nn;
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;
use crate::model::{DOUBLE, Model};
use crate::zero::Build;

fn weight(rows: i64) -> Tensor {
    Tensor::ones([rows, 4], DOUBLE).set_requires_grad(true)
}

/// The refusal of a unit with these parameters, on each rank.
fn refusal(group: &ProcessGroup, params: impl IntoParameters) -> Result<ShardError> {
    let mut builder = FullyShardedDataParallel::builder(group)?;
    match builder.unit("unit", params) {
        Err(error) => Ok(error),
        Ok(unit) => anyhow::bail!("{} was taken", unit.name()),
    }
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let rank = group.rank();
    let is_own = |error: &ShardError, text: &str| {
        ensure!(error.to_string().contains(text), "{error}, but should be: {text}");
        Ok(())
    };
    // Wrong on each rank.
    is_own(&refusal(&group, Vec::<Parameter>::new())?, "it has no parameters")?;
    is_own(&refusal(&group, [("scalar", Tensor::ones(&[0i64; 0][..], DOUBLE))])?, "`scalar`: it has no rows")?;
    is_own(&refusal(&group, [("whole", Tensor::ones([2], (Kind::Int64, Device::Cpu)))])?, "of dtype Int64")?;
    let large = weight(8);
    let computed = &large * 2.0;
    is_own(&refusal(&group, [("computed", computed)])?, "it is no leaf")?;
    let part = large.detach().narrow(0, 0, 4);
    is_own(&refusal(&group, [("part", &part)])?, "shared with another tensor")?;
    drop(part);

    // Wrong on rank 1 alone.
    let own = weight(if rank == 1 { 6 } else { 4 });
    let told = refusal(&group, [("own", &own)])?;
    ensure!(
        matches!(&told, ShardError::RanksDisagree { rank: 1, what, .. } if what == "parameter `own` of the unit `unit`"),
        "{told:?}"
    );
    let own = weight(4).set_requires_grad(rank != 1);
    let told = refusal(&group, [("own", &own)])?;
    ensure!(matches!(&told, ShardError::RanksDisagree { rank: 1, found, .. } if found.contains("frozen")), "{told:?}");
    let own: Vec<Tensor> = if rank == 1 { vec![weight(4), weight(4)] } else { vec![weight(4)] };
    ensure!(matches!(refusal(&group, own)?, ShardError::RanksDisagree { rank: 1, .. }));
    let name = if rank == 1 { "b" } else { "a" };
    ensure!(matches!(refusal(&group, [(name, weight(4))])?, ShardError::RanksDisagree { rank: 1, .. }));
    let told = match rank {
        1 => refusal(&group, Vec::<Parameter>::new())?,
        _ => refusal(&group, [("own", weight(4))])?,
    };
    match rank {
        1 => ensure!(matches!(told, ShardError::Unit { .. }), "{told:?}"),
        _ => ensure!(matches!(told, ShardError::OtherRank { rank: 1, .. }), "{told:?}"),
    }
    let mut builder = FullyShardedDataParallel::builder(&group)?.reshard_after_forward(rank != 1);
    let told = builder.unit("unit", [("own", weight(4))]).map(drop);
    ensure!(matches!(&told, Err(ShardError::RanksDisagree { what, .. }) if what.contains("reshard")), "{told:?}");

    let mut builder = FullyShardedDataParallel::builder(&group)?.mixed_precision(Kind::Int64, None);
    let told = builder.unit("unit", [("own", weight(4))]).map(drop).expect_err("whole parameters of integers");
    is_own(&told, "its `mixed_precision` is of Int64")?;

    // In two units, a name that is taken, a model that another one shards.
    let (shared, other) = (weight(4), weight(4));
    let mut builder = FullyShardedDataParallel::builder(&group)?;
    builder.unit("first", [("shared", &shared)])?;
    let told = builder.unit("second", [("again", &shared)]).map(drop).expect_err("a parameter of two units");
    is_own(&told, "`again`: it is in the unit `first` already")?;
    let told = builder.unit("first", [("other", &other)]).map(drop).expect_err("a name of two units");
    is_own(&told, "its name is that of another unit")?;
    // Its name in states would be that of another unit's.
    let mut partial = FullyShardedDataParallel::builder(&group)?;
    partial.unit("block", [("weight", &weight(4))])?;
    let told = partial.build([("head", &weight(4))]).map(drop).expect_err("a model without the block");
    is_own(&told, "its parameter `weight` is not in the model")?;
    let fsdp = builder.build([("shared", &shared), ("other", &other)])?;
    let names: Vec<_> = fsdp.parameters().iter().map(|it| it.name().unwrap_or_default().to_owned()).collect();
    ensure!(names == ["shared", "other"], "{names:?}");
    is_own(&refusal(&group, [("shared", &shared)])?, "another part shards it")?;
    let told = FullyShardedDataParallel::builder(&group)?.build(Vec::<Parameter>::new()).map(drop);
    is_own(&told.expect_err("a model without parameters"), "it has no parameters")?;

    optimizers(&group)?;
    frozen(&group)
}

fn optimizers(group: &ProcessGroup) -> Result<()> {
    let model = Model::new(1);
    let fsdp = FullyShardedDataParallel::builder(group)?.build(&model.vs)?;
    let refused = |build: Build, text: &str| -> Result<()> {
        let told = fsdp.optimizer(build).map(drop);
        let fits = match &told {
            Err(ShardError::Optimizer(OptimizerError::DoesNotFit { reason, part })) => {
                *part == "FullyShardedOptimizer" && reason.contains(text)
            }
            _ => false,
        };
        ensure!(fits, "{text}: {told:?}");
        Ok(())
    };
    let elements = "steps each element by itself";
    refused(|params| Ok(Box::new(Adafactor::builder(params).build()?)), elements)?;
    refused(|params| Ok(Box::new(Lamb::builder(params).build()?)), elements)?;
    refused(|params| Ok(Box::new(Lars::builder(params).lr(0.1).build()?)), elements)?;
    refused(|params| Ok(Box::new(Prodigy::builder(params).build()?)), "depends on all others")?;
    refused(|params| Ok(Box::new(Sam::new(Sgd::builder(params).lr(0.1).build()?, 0.05)?)), "moves or averages")?;
    refused(|params| Ok(Box::new(Sgd::builder(params).lr(0.1).build_in_backward()?)), "steps in the backward pass")?;
    refused(
        |params| Ok(Box::new(Sgd::builder(params.into_iter().skip(1).collect::<Vec<_>>()).lr(0.1).build()?)),
        "other parameters",
    )?;
    // Of matrices alone, and float32.
    let vs = nn::VarStore::new(Device::Cpu);
    let layer = nn::linear(vs.root(), 8, 8, nn::LinearConfig { bias: false, ..Default::default() });
    let told = FullyShardedDataParallel::builder(group)?.build(&vs)?;
    for build in
        [(|params| Ok(Box::new(Muon::builder(params).lr(0.02).build()?) as Box<dyn Optimizer>)) as Build, |params| {
            Ok(Box::new(AdamW8Bit::builder(params).lr(0.02).build()?))
        }]
    {
        let told = told.optimizer(build).map(drop);
        ensure!(told.as_ref().is_err_and(|it| it.to_string().contains(elements)), "{told:?}");
    }
    drop(layer);
    // Groups by the rows of a rank.
    let told = fsdp.optimizer(|params| {
        let (some, none): (Vec<_>, Vec<_>) = params.into_iter().partition(|it| it.tensor().numel() > 5);
        AdamW::builder(some).lr(0.1).add_param_group(AdamW::group(none)).build()
    });
    ensure!(matches!(told.map(drop), Err(ShardError::RanksDisagree { .. })), "groups that differ by rank");
    // A rate of one rank.
    let rate = if group.rank() == 1 { 0.2 } else { 0.1 };
    let told = fsdp.optimizer(|params| Sgd::builder(params).lr(rate).build()).map(drop);
    ensure!(matches!(&told, Err(ShardError::RanksDisagree { rank: 1, .. })), "{told:?}");
    let told = DistributedDataParallel::new(&model.vs, group).map(drop);
    ensure!(told.as_ref().is_err_and(|it| it.to_string().contains("sharded over the ranks")), "{told:?}");
    Ok(())
}

/// Frozen parameters are gathered and stay; one that is unfrozen later is refused.
fn frozen(group: &ProcessGroup) -> Result<()> {
    let (trained, frozen) = (weight(4), weight(4).set_requires_grad(false));
    let mut builder = FullyShardedDataParallel::builder(group)?;
    let unit = builder.unit("unit", [("trained", &trained), ("frozen", &frozen)])?;
    let fsdp = builder.build([("trained", &trained), ("frozen", &frozen)])?;
    let mut opt = fsdp.optimizer(|params| Sgd::builder(params).lr(1.0).build())?;
    let run = || -> Result<Tensor, ShardError> {
        let inputs = Tensor::ones([1, 4], DOUBLE).set_requires_grad(true);
        let outputs = unit.forward(inputs, |x| x.matmul(&trained).matmul(&frozen).tanh())?;
        Ok(outputs.sum(Kind::Double))
    };
    fsdp.backward(&run()?)?;
    opt.step()?;
    let rows = fsdp.parameters();
    ensure!(rows[1].tensor().numel() == 0 || rows[1].tensor().min().double_value(&[]) == 1.0, "a frozen one has moved");
    let freed = fsdp.exchanges().iter().filter(|it| format!("{it:?}").starts_with("Freed")).count();
    ensure!(freed == 1, "{:?}", fsdp.exchanges());
    opt.zero_grad()?;
    let _ = frozen.set_requires_grad(true);
    let told = fsdp.backward(&run()?).expect_err("unfrozen later");
    ensure!(told.to_string().contains("`frozen`: it was frozen or unfrozen after it was sharded"), "{told}");
    let _ = frozen.set_requires_grad(false);
    fsdp.backward(&run()?)?;
    Ok(())
}
