//! Every collective on Python's inputs: this is one of two ranks.

use anyhow::{Result, ensure};
use overdrive_ddp::{ProcessGroup, ReduceOp};
use tch::Tensor;

use super::ddp::Results;
use crate::record::Given;

pub(super) fn collectives(given: &Given<'_>, group: &ProcessGroup) -> Result<Results> {
    let mut results = Results::new();
    for kind in given.value::<Vec<String>>("kinds")? {
        let own = given.tensor(&format!("{kind}.{}", group.rank()))?;
        let mut found = |name: &str, tensor: Tensor| {
            results.insert(format!("{kind}.{name}"), tensor);
        };
        for name in given.value::<Vec<String>>(&format!("{kind}.ops"))? {
            reductions(group, &own, op_of(&name)?, |what, tensor| found(&format!("{what}.{name}"), tensor))?;
        }
        copies(group, &own, &mut found)?;
        between_two(group, &own, &mut found)?;
    }
    Ok(results)
}

fn op_of(name: &str) -> Result<ReduceOp> {
    let ops = [
        ("sum", ReduceOp::Sum),
        ("avg", ReduceOp::Avg),
        ("product", ReduceOp::Product),
        ("min", ReduceOp::Min),
        ("max", ReduceOp::Max),
        ("band", ReduceOp::Band),
        ("bor", ReduceOp::Bor),
        ("bxor", ReduceOp::Bxor),
    ];
    let known = ops.into_iter().find(|(known, _)| *known == name);
    ensure!(known.is_some(), "there is no reduction {name}");
    Ok(known.map_or(ReduceOp::Sum, |(_, op)| op))
}

fn empty(like: &Tensor, shape: &[i64]) -> Tensor {
    like.new_empty(shape, (like.kind(), like.device()))
}

/// Copies of a tensor's rows.
fn rows(tensor: &Tensor) -> Vec<Tensor> {
    tensor.unbind(0).iter().map(Tensor::copy).collect()
}

fn reductions(group: &ProcessGroup, own: &Tensor, op: ReduceOp, mut found: impl FnMut(&str, Tensor)) -> Result<()> {
    let mut tensor = own.copy();
    group.all_reduce(&mut tensor, op)?;
    found("all_reduce", tensor);
    let mut several = [own.copy(), own.get(0).copy()];
    group.all_reduce_coalesced(&mut several, op)?;
    for (place, tensor) in several.into_iter().enumerate() {
        found(&format!("all_reduce_coalesced.{place}"), tensor);
    }
    let mut tensor = own.copy();
    group.reduce(&mut tensor, 1, op)?;
    if group.rank() == 1 {
        found("reduce", tensor);
    }
    found("reduce_scatter", group.reduce_scatter(&rows(own), op)?);
    let mut part = empty(own, &[1, 6]);
    group.reduce_scatter_into(&mut part, own, op)?;
    found("reduce_scatter_into", part);
    let mut parts = [empty(own, &[1, 6]), empty(own, &[3])];
    group.reduce_scatter_into_coalesced(&mut parts, &[own.copy(), own.get(1).copy()], op)?;
    for (place, part) in parts.into_iter().enumerate() {
        found(&format!("reduce_scatter_into_coalesced.{place}"), part);
    }
    Ok(())
}

fn copies(group: &ProcessGroup, own: &Tensor, found: &mut impl FnMut(&str, Tensor)) -> Result<()> {
    let mut tensor = own.copy();
    group.broadcast(&mut tensor, 1)?;
    found("broadcast", tensor);
    found("all_gather", Tensor::stack(&group.all_gather(own)?, 0));
    let mut whole = empty(own, &[4, 6]);
    group.all_gather_into(&mut whole, own)?;
    found("all_gather_into", whole);
    let two = [own.copy(), own.get(0).copy()];
    for (rank, list) in group.all_gather_coalesced(&two)?.into_iter().enumerate() {
        for (place, tensor) in list.into_iter().enumerate() {
            found(&format!("all_gather_coalesced.{rank}.{place}"), tensor);
        }
    }
    let mut wholes = [empty(own, &[4, 6]), empty(own, &[12])];
    group.all_gather_into_coalesced(&mut wholes, &two)?;
    for (place, whole) in wholes.into_iter().enumerate() {
        found(&format!("all_gather_into_coalesced.{place}"), whole);
    }
    if let Some(gathered) = group.gather(own, 0)? {
        found("gather", Tensor::stack(&gathered, 0));
    }
    let mut part = empty(own, &[6]);
    let parts = rows(own);
    group.scatter(&mut part, if group.rank() == 0 { &parts } else { &[] }, 0)?;
    found("scatter", part);
    Ok(())
}

fn between_two(group: &ProcessGroup, own: &Tensor, found: &mut impl FnMut(&str, Tensor)) -> Result<()> {
    let mut swapped = own.empty_like();
    group.all_to_all_single(&mut swapped, own, None)?;
    found("all_to_all_single", swapped);
    let mut received = [empty(own, &[6]), empty(own, &[6])];
    group.all_to_all(&mut received, &rows(own))?;
    found("all_to_all", Tensor::stack(&received, 0));
    let other = 1 - group.rank();
    let sent = group.send_async(own, other, 7)?;
    let mut tensor = own.empty_like();
    group.recv(&mut tensor, Some(other), 7)?;
    sent.wait()?;
    found("recv", tensor);
    if group.rank() == 1 {
        group.send(own, 0, 8)?;
    } else {
        let mut tensor = own.empty_like();
        ensure!(group.recv(&mut tensor, None, 8)? == 1, "only rank 1 sends");
        found("recv_from_anyone", tensor);
    }
    Ok(())
}
