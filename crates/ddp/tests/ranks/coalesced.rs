//! The coalesced collectives against their definition, in groups with and without `verify`.

use anyhow::{Context, Result, bail, ensure};
use overdrive_ddp::{DdpError, ProcessGroup, ReduceOp};
use tch::{Device, Kind, Tensor};

use crate::collectives::{KINDS, given, ops, reduced, same};
use crate::harness::{Meeting, PATIENCE};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

/// The shapes of the tensors in a list: six numbers each, and one empty tensor.
const SHAPES: [&[i64]; 4] = [&[2, 3], &[6], &[0, 3], &[3, 1, 2]];

/// The tensor that `rank` has at index `place` of the list, for the rank `to`.
fn part(rank: usize, place: usize, to: usize, kind: Kind) -> Tensor {
    shaped(given(rank, place + to, kind), place)
}

fn shaped(six: Tensor, place: usize) -> Tensor {
    let shape = SHAPES[place];
    if shape[0] == 0 { six.narrow(0, 0, 0) } else { six.view(shape) }
}

fn list(of: impl Fn(usize) -> Tensor) -> Vec<Tensor> {
    (0..SHAPES.len()).map(of).collect()
}

/// Concatenated along the first dimension.
fn joined(parts: impl Iterator<Item = Tensor>) -> Tensor {
    Tensor::cat(&parts.collect::<Vec<_>>(), 0)
}

fn all_same(found: &[Tensor], expected: &[Tensor], what: &str) -> Result<()> {
    ensure!(found.len() == expected.len(), "{what}: {} tensors instead of {}", found.len(), expected.len());
    found.iter().zip(expected).enumerate().try_for_each(|(place, (found, expected))| {
        ensure!(found.is_contiguous(), "{what}[{place}] is not contiguous");
        same(found, expected, what)
    })
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    every_dtype(&group)?;
    under_way(&group)
}

pub fn verified(meeting: &Meeting) -> Result<()> {
    every_dtype(&meeting.group_with(PATIENCE, true)?)
}

fn every_dtype(group: &ProcessGroup) -> Result<()> {
    for kind in KINDS {
        gathers(group, kind).with_context(|| format!("{kind:?}"))?;
        for op in ops(kind) {
            reductions(group, op, kind).with_context(|| format!("{op:?} of {kind:?}"))?;
        }
    }
    Ok(())
}

fn gathers(group: &ProcessGroup, kind: Kind) -> Result<()> {
    let (rank, ranks) = (group.rank(), group.size());
    let of_rank = |rank: usize| list(|place| part(rank, place, 0, kind));
    let own = of_rank(rank);

    let gathered = group.all_gather_coalesced(&own)?;
    ensure!(gathered.len() == ranks, "{} lists", gathered.len());
    for (from, found) in gathered.iter().enumerate() {
        all_same(found, &of_rank(from), "all_gather_coalesced")?;
    }

    let expected = list(|place| joined((0..ranks).map(|from| part(from, place, 0, kind))));
    let mut outputs: Vec<Tensor> = expected.iter().map(Tensor::zeros_like).collect();
    group.all_gather_into_coalesced(&mut outputs, &own)?;
    all_same(&outputs, &expected, "all_gather_into_coalesced")?;
    all_same(&own, &of_rank(rank), "the inputs")
}

fn reductions(group: &ProcessGroup, op: ReduceOp, kind: Kind) -> Result<()> {
    let (rank, ranks) = (group.rank(), group.size());
    let given = list(|place| joined((0..ranks).map(|to| part(rank, place, to, kind))));
    let inputs: Vec<Tensor> = given.iter().map(Tensor::copy).collect();
    let expected = list(|place| shaped(reduced(op, ranks, place + rank, kind), place));
    let mut outputs: Vec<Tensor> = expected.iter().map(Tensor::zeros_like).collect();
    group.reduce_scatter_into_coalesced(&mut outputs, &inputs, op)?;
    all_same(&outputs, &expected, "reduce_scatter_into_coalesced")?;
    all_same(&inputs, &given, "the inputs")
}

/// Several at once, waited for in a different order than they were started; a parameter stays a leaf.
fn under_way(group: &ProcessGroup) -> Result<()> {
    let (rank, ranks) = (group.rank(), group.size());
    let ones = |rows: usize| Tensor::ones([rows as i64], FLOAT);
    let mut wholes = [ones(ranks), ones(2 * ranks).set_requires_grad(true)];
    let mut parts = [ones(1), ones(2).set_requires_grad(true)];
    let lists = group.all_gather_coalesced_async(&[ones(1) * rank as f64])?;
    let gather = group.all_gather_into_coalesced_async(&mut wholes, &[ones(1) * 2.0, ones(2) * 3.0])?;
    let scatter =
        group.reduce_scatter_into_coalesced_async(&mut parts, &[ones(ranks), ones(2 * ranks)], ReduceOp::Avg)?;
    scatter.wait_for(PATIENCE)?;
    scatter.wait()?;
    gather.wait_for(PATIENCE)?;
    ensure!(gather.is_completed());
    gather.wait()?;
    for (from, list) in lists.wait()?.iter().enumerate() {
        same(&list[0], &(ones(1) * from as f64), "all_gather_coalesced_async")?;
    }
    same(&wholes[0], &(ones(ranks) * 2.0), "all_gather_into_coalesced_async")?;
    same(&wholes[1].detach(), &(ones(2 * ranks) * 3.0), "all_gather_into_coalesced_async")?;
    same(&parts[1].detach(), &ones(2), "reduce_scatter_into_coalesced_async")?;
    ensure!([&wholes[1], &parts[1]].iter().all(|param| param.is_leaf() && param.requires_grad()));
    Ok(())
}

/// Each is refused before anything is sent, so the group remains usable.
pub fn refusals(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let of = |rows: i64| Tensor::ones([rows], FLOAT);
    let double = |rows: i64| of(rows).to_kind(Kind::Double);
    let gather = |mut outputs: Vec<Tensor>, inputs: &[Tensor]| group.all_gather_into_coalesced(&mut outputs, inputs);
    let scatter_by =
        |mut outputs: Vec<Tensor>, inputs: &[Tensor], op| group.reduce_scatter_into_coalesced(&mut outputs, inputs, op);
    let scatter = |outputs: Vec<Tensor>, inputs: &[Tensor]| scatter_by(outputs, inputs, ReduceOp::Sum);
    let every = |tensors: &[Tensor]| group.all_gather_coalesced(tensors).map(drop);
    let cases: Vec<(&str, Result<(), DdpError>)> = vec![
        ("at least one tensor", every(&[])),
        ("tensors[1] is Double", every(&[of(1), double(1)])),
        ("tensors[1] is undefined", every(&[of(1), Tensor::new()])),
        ("not contiguous", every(&[Tensor::ones([2, 3], FLOAT).tr()])),
        ("dtype Int16", every(&[of(1).to_kind(Kind::Int16)])),
        ("at least one tensor", gather(vec![], &[])),
        ("at least one tensor", gather(vec![of(2)], &[])),
        ("as many as inputs: 2", gather(vec![of(2)], &[of(1), of(1)])),
        ("as many as inputs: 1", gather(vec![], &[of(1)])),
        ("outputs[1] is of 3 elements, but should be of 4", gather(vec![of(2), of(3)], &[of(1), of(2)])),
        ("inputs[1] is Double", gather(vec![of(2), double(2)], &[of(1), double(1)])),
        ("outputs[0] is Double", gather(vec![double(2)], &[of(1)])),
        ("sparse", gather(vec![of(2).to_sparse_sparse_dim(1)], &[of(1)])),
        ("at least one tensor", scatter(vec![], &[])),
        ("at least one tensor", scatter(vec![], &[of(2)])),
        ("as many as outputs: 1", scatter(vec![of(1)], &[of(2), of(2)])),
        ("inputs[1] is of 5 elements, but should be of 4", scatter(vec![of(1), of(2)], &[of(2), of(5)])),
        ("outputs[1] is Double", scatter(vec![of(1), double(1)], &[of(2), double(2)])),
        ("only NCCL", scatter_by(vec![of(1)], &[of(2)], ReduceOp::PremulSum(2.0))),
        ("whole numbers", scatter_by(vec![of(1)], &[of(2)], ReduceOp::Band)),
    ];
    for (index, (named, refused)) in cases.into_iter().enumerate() {
        let error = refused.err().with_context(|| format!("case {index}, {named}, was not refused"))?;
        ensure!(error.to_string().contains(named), "case {index}: {error} does not say {named:?}");
    }
    let mut fine = [of(2)];
    group.all_gather_into_coalesced(&mut fine, &[of(1) * 3.0])?;
    same(&fine[0], &(of(2) * 3.0), "all_gather_into_coalesced after the refusals")
}

/// Equally many numbers on both ranks, but in different tensors: reported only in groups that verify.
pub fn other_lists(meeting: &Meeting) -> Result<()> {
    let group = meeting.group_with(PATIENCE, true)?;
    let (one, other) = if meeting.rank == 0 { (1, 3) } else { (3, 1) };
    let of = |rows: i64| Tensor::ones([rows], FLOAT);
    let told = |ran: Result<(), DdpError>| match ran {
        Err(DdpError::Mismatch { .. }) => Ok(()),
        other => bail!("{other:?}"),
    };
    told(group.all_gather_into_coalesced(&mut [of(2 * one), of(2 * other)], &[of(one), of(other)]))?;
    told(group.all_gather_coalesced(&[of(one), of(other)]).map(drop))?;
    let (wholes, mut parts) = ([of(2 * one), of(2 * other)], [of(one), of(other)]);
    told(group.reduce_scatter_into_coalesced(&mut parts, &wholes, ReduceOp::Sum))
}
