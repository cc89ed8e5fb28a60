//! ZeRO-3 rows that a program changes by itself: before a backward pass, and on one rank alone.

use anyhow::{Context, Result, ensure};
use overdrive_ddp::ProcessGroup;
use tch::{Kind, Tensor};

use crate::full::Sharded;
use crate::full_failures::Pair;
use crate::harness::Meeting;
use crate::model::{Model, close, data};

/// Rows that change between a forward and its backward pass.
pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let mut pair = Pair::new(&group)?;
    pair.goes_on()?;
    // Of a unit that is gathered again, and of the last one, which is not; on all ranks, and on one.
    for name in ["layer1.weight", "layer0.weight"] {
        for is_everywhere in [true, false] {
            let loss = pair.sharded.loss(&data(0, 0, group.rank()))?;
            let before = if is_everywhere || group.rank() == 0 { change(&pair.sharded, name)? } else { None };
            let told = pair.sharded.fsdp.backward(&loss).expect_err("a pass over other values");
            ensure!(told.to_string().contains("changed after the forward"), "{name}: {told}");
            if let Some((rows, before)) = before {
                let _no_grad = tch::no_grad_guard();
                rows.shallow_clone().f_copy_(&before)?;
            }
            pair.goes_on().with_context(|| format!("after a change of {name}, everywhere: {is_everywhere}"))?;
        }
    }
    // A rank without a loss of its own has changed them.
    if group.size() > 1 {
        let loss = pair.sharded.loss(&data(0, 0, group.rank()))?;
        let before = if group.rank() == 0 { change(&pair.sharded, "layer1.weight")? } else { None };
        let told = match group.rank() {
            0 => overdrive_core::GradientSync::close_with_nothing(&pair.sharded.fsdp).map_err(|it| it.to_string()),
            _ => pair.sharded.fsdp.backward(&loss).map_err(|it| it.to_string()),
        };
        ensure!(told.as_ref().is_err_and(|it| it.contains("changed after the forward")), "{told:?}");
        if let Some((rows, before)) = before {
            let _no_grad = tch::no_grad_guard();
            rows.shallow_clone().f_copy_(&before)?;
        }
        pair.goes_on()?;
    }
    Ok(())
}

/// Changes this rank's rows of a parameter in place. Returns them, and what they were.
fn change(sharded: &Sharded, name: &str) -> Result<Option<(Tensor, Tensor)>> {
    let params = sharded.fsdp.parameters();
    let rows = params.iter().find(|it| it.name() == Some(name)).context("a parameter")?.tensor().shallow_clone();
    let before = rows.detach().copy();
    let _no_grad = tch::no_grad_guard();
    let _changed = rows.shallow_clone().f_add_scalar_(0.5)?;
    Ok(Some((rows, before)))
}

/// Rows that one rank changes where all have kept the whole, or gathered it ahead.
pub fn kept(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    for (at, name) in ["layer0.weight", "layer1.bias", "layer2.weight"].into_iter().enumerate() {
        for units in [&[1, 2][..], &[0, 1, 2, 3]] {
            for reshards in [true, false] {
                for evaluations in [0, 2] {
                    let writer = at % group.size();
                    written_by_one(&group, name, units, (reshards, evaluations), writer)
                        .with_context(|| format!("{name}, {units:?}, {reshards}, {evaluations}, rank {writer}"))?;
                }
            }
        }
    }
    Ok(())
}

fn written_by_one(
    group: &ProcessGroup,
    name: &str,
    units: &[usize],
    (reshards, evaluations): (bool, usize),
    writer: usize,
) -> Result<()> {
    let sharded = Sharded::with(group, 1, units, |builder| builder.reshard_after_forward(reshards))?;
    let alone = Model::new(1);
    let batch = || data(0, 0, group.rank());
    sharded.fsdp.backward(&sharded.loss(&batch())?)?;
    for round in 0..3 {
        // A forward without backward keeps units, and evaluations gather the first unit ahead.
        let kept = if evaluations == 0 { Some(sharded.loss(&batch())?) } else { None };
        for _ in 0..evaluations {
            let _loss = tch::no_grad(|| sharded.loss(&batch()))?;
        }
        if group.rank() == writer {
            change(&sharded, name)?;
        }
        let whole = alone.vs.variables()[name].shallow_clone();
        let _no_grad = tch::no_grad_guard();
        let rows = whole.chunk(group.size() as i64, 0).into_iter().nth(writer).context("rows")?;
        let _changed = rows.shallow_clone().f_add_scalar_(0.5)?;
        let expected = (alone.forward(&batch().0) - batch().1).square().mean(Kind::Double);
        for _ in 0..2 {
            let found = sharded.loss(&batch())?;
            close(&[(String::new(), found)], &[(String::new(), expected.shallow_clone())])
                .with_context(|| format!("round {round}"))?;
        }
        drop(kept);
    }
    // The graph that a kept whole belongs to is refused.
    let loss = sharded.loss(&batch())?;
    if group.rank() == writer {
        change(&sharded, name)?;
    }
    let _loss = tch::no_grad(|| sharded.loss(&batch()))?;
    ensure!(sharded.fsdp.backward(&loss).is_err(), "a graph of the values from before");
    sharded.fsdp.backward(&sharded.loss(&batch())?)?;
    Ok(())
}
