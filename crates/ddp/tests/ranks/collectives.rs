//! Every collective against its definition, for every dtype that Gloo takes.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use overdrive_ddp::{Backend, DdpError, InitMethod, ProcessGroup, ReduceOp};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::harness::{self, Meeting, PATIENCE};

pub const KINDS: [Kind; 9] = [
    Kind::Half,
    Kind::BFloat16,
    Kind::Float,
    Kind::Double,
    Kind::Int8,
    Kind::Uint8,
    Kind::Int,
    Kind::Int64,
    Kind::Bool,
];

/// Rank `rank`'s input for `part`: small whole numbers, so that every dtype holds them, their sums and products
/// exactly.
pub fn given(rank: usize, part: usize, kind: Kind) -> Tensor {
    let numbers: Vec<i64> = (0..6).map(|place| ((rank + 2 * part + place) % 3) as i64).collect();
    Tensor::from_slice(&numbers).view([2, 3]).to_kind(kind)
}

pub fn same(found: &Tensor, expected: &Tensor, what: &str) -> Result<()> {
    let alike = found.kind() == expected.kind() && found.size() == expected.size();
    ensure!(alike && found.equal(expected), "{what}: {found} instead of {expected}");
    Ok(())
}

/// The expected result of a reduction, computed rank by rank in 64-bit whole numbers.
pub fn reduced(op: ReduceOp, ranks: usize, part: usize, kind: Kind) -> Tensor {
    let mut all = (0..ranks).map(|rank| given(rank, part, kind).to_kind(Kind::Int64));
    let first = all.next().unwrap();
    let total = all.fold(first, |one, other| match op {
        ReduceOp::Sum | ReduceOp::Avg => one + other,
        ReduceOp::Product => one * other,
        ReduceOp::Min => one.minimum(&other),
        ReduceOp::Max => one.maximum(&other),
        ReduceOp::Band => one.bitwise_and_tensor(&other),
        ReduceOp::Bor => one.bitwise_or_tensor(&other),
        ReduceOp::Bxor => one.bitwise_xor_tensor(&other),
        _ => unreachable!(),
    });
    if op == ReduceOp::Avg {
        return (total.to_kind(kind)) / ranks as f64;
    }
    total.to_kind(kind)
}

pub fn ops(kind: Kind) -> Vec<ReduceOp> {
    let mut ops = vec![ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max];
    match kind {
        Kind::Half | Kind::BFloat16 | Kind::Float | Kind::Double => ops.push(ReduceOp::Avg),
        _ => ops.extend([ReduceOp::Band, ReduceOp::Bor, ReduceOp::Bxor]),
    }
    ops
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    ensure!(group.rank() == meeting.rank && group.local_rank() == Some(meeting.rank));
    for kind in KINDS {
        for op in ops(kind) {
            reductions(&group, op, kind).with_context(|| format!("{op:?} of {kind:?}"))?;
        }
        for root in 0..group.size() {
            from_and_to(&group, root, kind).with_context(|| format!("root {root}, {kind:?}"))?;
        }
        exchanges(&group, kind).with_context(|| format!("{kind:?}"))?;
        one_to_one(&group, kind).with_context(|| format!("{kind:?}"))?;
    }
    group.barrier()?;
    group.barrier_async()?.wait()?;
    group.monitored_barrier(PATIENCE, true)?;
    handles(&group)
}

fn reductions(group: &ProcessGroup, op: ReduceOp, kind: Kind) -> Result<()> {
    let (rank, ranks) = (group.rank(), group.size());
    let expected = reduced(op, ranks, 0, kind);

    let mut tensor = given(rank, 0, kind);
    group.all_reduce(&mut tensor, op)?;
    same(&tensor, &expected, "all_reduce")?;

    let mut several = [given(rank, 0, kind), given(rank, 1, kind).view([6])];
    group.all_reduce_coalesced(&mut several, op)?;
    same(&several[0], &expected, "all_reduce_coalesced")?;
    same(&several[1], &reduced(op, ranks, 1, kind).view([6]), "all_reduce_coalesced")?;

    for root in 0..ranks {
        let mut tensor = given(rank, 0, kind);
        group.reduce(&mut tensor, root, op)?;
        if rank == root {
            same(&tensor, &expected, "reduce")?;
        }
    }

    let parts: Vec<Tensor> = (0..ranks).map(|part| given(rank, part, kind)).collect();
    let mine = reduced(op, ranks, rank, kind);
    same(&group.reduce_scatter(&parts, op)?, &mine, "reduce_scatter")?;
    let mut output = given(0, 0, kind).zeros_like();
    group.reduce_scatter_into(&mut output, &Tensor::cat(&parts, 0), op)?;
    same(&output, &mine, "reduce_scatter_into")
}

fn from_and_to(group: &ProcessGroup, root: usize, kind: Kind) -> Result<()> {
    let (rank, ranks) = (group.rank(), group.size());
    let mut tensor = given(rank, 0, kind);
    group.broadcast(&mut tensor, root)?;
    same(&tensor, &given(root, 0, kind), "broadcast")?;

    let gathered = group.gather(&given(rank, 0, kind), root)?;
    ensure!(gathered.is_some() == (rank == root), "gather: only the root gets tensors");
    for (from, tensor) in gathered.iter().flatten().enumerate() {
        same(tensor, &given(from, 0, kind), "gather")?;
    }

    let parts: Vec<Tensor> = (0..ranks).map(|part| given(root, part, kind)).collect();
    let mut output = given(0, 0, kind).zeros_like();
    group.scatter(&mut output, if rank == root { &parts } else { &[] }, root)?;
    same(&output, &given(root, rank, kind), "scatter")
}

fn exchanges(group: &ProcessGroup, kind: Kind) -> Result<()> {
    let (rank, ranks) = (group.rank(), group.size());
    let everyones: Vec<Tensor> = (0..ranks).map(|from| given(from, 0, kind)).collect();
    for (found, expected) in group.all_gather(&given(rank, 0, kind))?.iter().zip(&everyones) {
        same(found, expected, "all_gather")?;
    }
    let expected = Tensor::cat(&everyones, 0);
    let mut output = expected.zeros_like();
    group.all_gather_into(&mut output, &given(rank, 0, kind))?;
    same(&output, &expected, "all_gather_into")?;

    let inputs: Vec<Tensor> = (0..ranks).map(|to| given(rank, to, kind)).collect();
    let mut outputs: Vec<Tensor> = inputs.iter().map(Tensor::zeros_like).collect();
    group.all_to_all(&mut outputs, &inputs)?;
    for (from, output) in outputs.iter().enumerate() {
        same(output, &given(from, rank, kind), "all_to_all")?;
    }
    let mut output = Tensor::cat(&inputs, 0).zeros_like();
    group.all_to_all_single(&mut output, &Tensor::cat(&inputs, 0), None)?;
    let received: Vec<Tensor> = (0..ranks).map(|from| given(from, rank, kind)).collect();
    same(&output, &Tensor::cat(&received, 0), "all_to_all_single")?;

    // Rank r sends r + 1 rows to each.
    let row = |from: usize| given(from, 0, kind).narrow(0, 0, 1);
    let rows = |from: usize| row(from).repeat([from as i64 + 1, 1]);
    let input = rows(rank).repeat([ranks as i64, 1]);
    let received: Vec<Tensor> = (0..ranks).map(rows).collect();
    let expected = Tensor::cat(&received, 0);
    let mut output = expected.zeros_like();
    let sent = vec![rank as i64 + 1; ranks];
    let got: Vec<i64> = (1..=ranks as i64).collect();
    group.all_to_all_single(&mut output, &input, Some((&sent, &got)))?;
    same(&output, &expected, "all_to_all_single with splits")
}

/// Around the ring, and to rank 0 from whichever rank sends first.
fn one_to_one(group: &ProcessGroup, kind: Kind) -> Result<()> {
    let (rank, ranks) = (group.rank(), group.size());
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let sent = group.send_async(&given(rank, 1, kind), next, 7)?;
    let mut received = given(0, 0, kind).zeros_like();
    ensure!(group.recv(&mut received, Some(previous), 7)? == previous);
    sent.wait()?;
    same(&received, &given(previous, 1, kind), "recv")?;
    if rank != 0 {
        group.send(&given(rank, 0, kind), 0, 8)?;
        return Ok(());
    }
    let mut seen = vec![0];
    for _ in 1..ranks {
        let mut received = given(0, 0, kind).zeros_like();
        let from = group.recv(&mut received, None, 8)?;
        same(&received, &given(from, 0, kind), "recv from anyone")?;
        seen.push(from);
    }
    seen.sort_unstable();
    ensure!(seen == (0..ranks).collect::<Vec<_>>(), "each sends once: {seen:?}");
    Ok(())
}

/// Several under way at once, waited for in a different order than they were started.
fn handles(group: &ProcessGroup) -> Result<()> {
    let mut tensors: Vec<Tensor> = (0..8).map(|part| given(group.rank(), part, Kind::Float)).collect();
    let works = tensors.iter_mut().map(|tensor| group.all_reduce_async(tensor, ReduceOp::Sum));
    let works: Vec<_> = works.collect::<Result<_, _>>()?;
    for work in works.into_iter().rev() {
        work.wait_for(PATIENCE)?;
        ensure!(work.is_completed());
        work.wait()?;
    }
    for (part, tensor) in tensors.iter().enumerate() {
        same(tensor, &reduced(ReduceOp::Sum, group.size(), part, Kind::Float), "all_reduce_async")?;
    }
    // A parameter is written in place, and stays a leaf.
    let mut param = Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    group.all_reduce(&mut param, ReduceOp::Avg)?;
    ensure!(param.is_leaf() && param.requires_grad());
    same(&param.detach(), &Tensor::ones([2], (Kind::Float, Device::Cpu)), "all_reduce of a parameter")
}

pub fn sub_groups(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let ends = group.new_group(&[2, 0])?;
    let single = group.new_group(&[1])?;
    ensure!(ends.is_some() == (meeting.rank != 1) && single.is_some() == (meeting.rank == 1));
    if let Some(ends) = &ends {
        ensure!(ends.size() == 2 && ends.rank() == meeting.rank / 2 && ends.global_ranks() == [0, 2]);
        let mut sum = Tensor::from(meeting.rank as i64);
        ends.all_reduce(&mut sum, ReduceOp::Sum)?;
        ensure!(sum.int64_value(&[]) == 2);
        let inner = ends.new_group(&[1])?;
        ensure!(inner.is_some() == (meeting.rank == 2));
        ensure!(inner.is_none_or(|inner| inner.global_ranks() == [2]));
    }
    for (ranks, named) in [(&[0, 0][..], "twice"), (&[], "there are none"), (&[3], "rank 3 is outside")] {
        let error = group.new_group(ranks).unwrap_err().to_string();
        ensure!(error.contains(named), "{error}");
    }
    group.barrier()?;
    // The program can use the group's store.
    if meeting.rank == 0 {
        group.store().set("greeting", b"hello")?;
    }
    ensure!(group.store().get("greeting", PATIENCE)? == b"hello");
    ensure!(group.store().check(&["greeting"])? && !group.store().check(&["greeting", "nothing"])?);
    let missing = group.store().get("nothing", Duration::from_millis(50)).unwrap_err();
    ensure!(missing.kind() == overdrive_core::TorchErrorKind::Timeout, "{missing}");
    group.barrier()?;
    Ok(())
}

/// Each is refused before anything is sent, so the group remains usable.
pub fn refusals(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let float = |shape: &[i64]| Tensor::ones(shape, (Kind::Float, Device::Cpu));
    let mut fine = float(&[2, 3]);
    let cases: Vec<(&str, Result<(), DdpError>)> = vec![
        ("undefined", group.all_reduce(&mut Tensor::new(), ReduceOp::Sum)),
        ("sparse", group.all_reduce(&mut fine.to_sparse_sparse_dim(2), ReduceOp::Sum)),
        ("not contiguous", group.broadcast(&mut float(&[2, 3]).tr(), 0)),
        ("dtype Int16", group.all_gather(&fine.to_kind(Kind::Int16)).map(drop)),
        ("dtype ComplexFloat", group.broadcast(&mut fine.to_kind(Kind::ComplexFloat), 0)),
        ("the root is rank 2", group.broadcast(&mut fine, 2)),
        ("only NCCL", group.all_reduce(&mut fine, ReduceOp::PremulSum(2.0))),
        ("not Int", group.all_reduce(&mut fine.to_kind(Kind::Int), ReduceOp::Avg)),
        ("whole numbers", group.all_reduce(&mut fine, ReduceOp::Bxor)),
        ("at least one tensor", group.all_reduce_coalesced(&mut [], ReduceOp::Sum)),
        ("like the first", group.all_reduce_coalesced(&mut [float(&[1]), fine.to_kind(Kind::Double)], ReduceOp::Sum)),
        ("one tensor per rank, 2 in all", group.reduce_scatter(&[float(&[1])], ReduceOp::Sum).map(drop)),
        ("like the first", group.reduce_scatter(&[float(&[1]), float(&[2])], ReduceOp::Sum).map(drop)),
        ("of 12", group.all_gather_into(&mut float(&[11]), &fine)),
        ("of 12", group.reduce_scatter_into(&mut fine, &float(&[13]), ReduceOp::Sum)),
        ("inputs is a list of 1", group.scatter(&mut fine, &[float(&[1])], 1 - meeting.rank)),
        ("outputs is a list of 0", group.all_to_all(&mut [], &[float(&[1])])),
        (
            "of 3 rows, but should be of a multiple of 2 rows",
            group.all_to_all_single(&mut float(&[2]), &float(&[3]), None),
        ),
        ("split into [1, 1]", group.all_to_all_single(&mut float(&[2]), &float(&[3]), Some((&[1, 1], &[1, 1])))),
        ("split into [4, -1]", group.all_to_all_single(&mut float(&[2]), &float(&[3]), Some((&[4, -1], &[1, 1])))),
        (
            "split into [9223372036854775807, 1]",
            group.all_to_all_single(&mut float(&[2]), &float(&[3]), Some((&[i64::MAX, 1], &[1, 1]))),
        ),
        ("a scalar", group.all_to_all_single(&mut Tensor::from(1.0), &Tensor::from(1.0), None)),
        ("with itself", group.send(&fine, meeting.rank, 0)),
        ("the other rank is rank 9", group.recv(&mut float(&[1]), Some(9), 0).map(drop)),
    ];
    for (index, (named, refused)) in cases.into_iter().enumerate() {
        let error = refused.err().with_context(|| format!("case {index}, {named}, was not refused"))?;
        ensure!(error.to_string().contains(named), "case {index}: {error} does not say {named:?}");
    }
    group.all_reduce(&mut fine, ReduceOp::Sum)?;
    same(&fine, &(float(&[2, 3]) * 2.0), "all_reduce after the refusals")
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Report {
    rank: usize,
    losses: Vec<f64>,
    note: Option<String>,
}

/// Cannot be serialized on rank 1.
#[derive(Debug, Deserialize)]
struct Stubborn;

impl Serialize for Stubborn {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let rank = std::env::var("RANK").unwrap_or_default();
        if rank == "1" {
            Err(serde::ser::Error::custom("stubborn"))
        } else {
            serializer.serialize_unit_struct("Stubborn")
        }
    }
}

pub fn objects(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let report = |rank: usize| Report { rank, losses: vec![0.5; rank * 10], note: (rank == 2).then(|| "last".into()) };
    let all = group.all_gather_object(&report(meeting.rank))?;
    ensure!(all == (0..3).map(report).collect::<Vec<_>>());
    let nan = group.all_gather_object(&f64::NAN)?;
    ensure!(nan.len() == 3 && nan.iter().all(|value| value.is_nan()));
    for root in 0..3 {
        let own = report(root);
        let object = (meeting.rank == root).then_some(&own);
        ensure!(group.broadcast_object(object, root)? == report(root));
    }
    // An object that cannot be serialized is an error on all ranks, and the group remains usable.
    let error = group.all_gather_object(&Stubborn).unwrap_err().to_string();
    ensure!(error.contains("rank 1 cannot be sent"), "{error}");
    let error = group.broadcast_object(Some(&Stubborn).filter(|_| meeting.rank == 1), 1).unwrap_err().to_string();
    ensure!(error.contains("rank 1 cannot be sent"), "{error}");
    let error = group.broadcast_object::<String>(None, 0).unwrap_err().to_string();
    ensure!(error.contains("rank 0 cannot be sent"), "{error}");
    // Reading another type than was sent.
    let read: Result<Vec<String>, _> = group.all_gather_object(&7u8).and(Ok(vec![]));
    ensure!(read.is_ok());
    Ok(())
}

pub fn meet_at_a_file() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let started = Instant::now();
    let path = folder.path().join("meet").display().to_string();
    let ranks = (0..2).map(|rank| {
        let address = format!("file://{path}?rank={rank}&world_size=2");
        harness::start("options", rank, 2, 1, &[("OVERDRIVE_TEST_ADDRESS", &address)])
    });
    harness::all_through(ranks.collect::<Result<_>>()?, started).map(drop)
}

pub fn meet_alone() -> Result<()> {
    let started = Instant::now();
    harness::all_through(vec![harness::start("alone", 0, 1, 0, &[])?], started).map(drop)
}

/// By the launcher's variables with port 0, and by an address with port 0: each group gets its own port.
pub fn alone_at_any_port(meeting: &Meeting) -> Result<()> {
    let address = "tcp://127.0.0.1:0?rank=0&world_size=1";
    let groups = [meeting.group()?, ProcessGroup::builder(Backend::Gloo).init(&InitMethod::parse(address)?)?];
    for group in groups {
        let mut sum = Tensor::from(3);
        group.all_reduce(&mut sum, ReduceOp::Sum)?;
        ensure!(group.size() == 1 && sum.int64_value(&[]) == 3);
    }
    Ok(())
}

/// The address that the test has set, else the launcher's.
pub fn address() -> Result<InitMethod> {
    match std::env::var("OVERDRIVE_TEST_ADDRESS") {
        Ok(address) => Ok(InitMethod::parse(&address)?),
        Err(_) => Ok(InitMethod::Auto),
    }
}

pub fn any_group() -> Result<ProcessGroup> {
    Ok(ProcessGroup::builder(Backend::Gloo).timeout(PATIENCE).init(&address()?)?)
}
