//! Groups that are parts of another one's communicator, and streams of high priority.

use anyhow::{Context, Result, ensure};
use overdrive::prelude::*;
use overdrive_ddp::{Backend, InitMethod, ReduceOp};
use overdrive_fakecuda::Fake;

use super::PATIENCE;
use super::processes::{Meeting, run};

const RANKS: usize = 4;
/// Rank 1 is in none.
const PARTS: [&[usize]; 2] = [&[2, 0], &[3]];

pub fn scenario(meeting: &Meeting) -> Result<()> {
    for backend in [Backend::Nccl, Backend::Gloo] {
        for high in [false, true] {
            split(meeting, backend, high)?;
        }
    }
    Ok(())
}

fn split(meeting: &Meeting, backend: Backend, high: bool) -> Result<()> {
    let builder = ProcessGroup::builder(backend).timeout(PATIENCE).high_priority_stream(high);
    let builder = if backend == Backend::Nccl { builder.cuda_device(meeting.rank) } else { builder };
    let path = meeting.file.with_extension(format!("{backend:?}{high}"));
    let group = builder.init(&InitMethod::File { path, rank: meeting.rank, world_size: meeting.size })?;
    let rank = group.rank();
    for parts in [&[&[0, 1][..], &[1, 2]][..], &[&[0][..], &[]], &[&[4][..]]] {
        let error = group.split_group(parts).err().with_context(|| format!("{parts:?} were accepted"))?;
        ensure!(error.to_string().contains("cannot be a group"), "{error}");
    }
    // The group's own communicator may not be there yet.
    for _ in 0..2 {
        let part = group.split_group(&PARTS)?;
        let members: &[usize] = match rank {
            0 | 2 => &[0, 2],
            3 => &[3],
            _ => &[],
        };
        ensure!(part.as_ref().map_or(&[][..], ProcessGroup::global_ranks) == members, "{part:?}");
        let Some(part) = part else { continue };
        let mut sum = Tensor::full([3], 1.0 + rank as f64, (Kind::Float, group.device()));
        part.all_reduce(&mut sum, ReduceOp::Sum)?;
        let expected: usize = members.iter().map(|rank| 1 + rank).sum();
        ensure!(sum.double_value(&[2]) == expected as f64, "{backend:?}: {sum}");
        // A part is divided as any group is.
        let own = part.split_group(&[&[part.rank()]]);
        ensure!(part.size() > 1 || own?.is_some());
    }
    let mut sum = Tensor::ones([3], (Kind::Float, group.device()));
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    ensure!(sum.double_value(&[0]) == RANKS as f64, "the whole group does not work any more: {sum}");
    group.close().context("close")?;
    Ok(())
}

pub fn groups_are_split_into_parts() -> Result<()> {
    run("splits", RANKS, &[]).map(drop)
}

/// What NCCL is asked for.
pub fn asked(meeting: &Meeting) -> Result<()> {
    let fake = Fake::get().context("only a fake device tells")?;
    for high in [false, true] {
        let builder = ProcessGroup::builder(Backend::Nccl).timeout(PATIENCE).high_priority_stream(high);
        let path = meeting.file.with_extension(format!("{high}"));
        let method = InitMethod::File { path, rank: meeting.rank, world_size: meeting.size };
        let group = builder.cuda_device(meeting.rank).init(&method)?;
        let mut sum = Tensor::ones([3], (Kind::Float, group.device()));
        fake.reset();
        let part = group.split_group(&[&[0], &[1]])?.context("each rank is in a part")?;
        group.all_reduce(&mut sum, ReduceOp::Sum)?;
        part.all_reduce(&mut sum, ReduceOp::Sum)?;
        let calls = fake.counts().get("nccl calls on streams of high priority").copied().unwrap_or(0);
        ensure!(calls == if high { 2 } else { 0 }, "{high}: {calls} of 2 calls were on a stream of high priority");
        fake.fail("ncclCommSplit", 1, 3);
        let error = group.split_group(&[&[0], &[1]]).err().context("a split that fails succeeds")?;
        ensure!(error.to_string().contains("split_group"), "{error}");
        group.abort()?;
    }
    Ok(())
}

pub fn a_split_asks_nccl_for_one_and_streams_are_of_the_priority_asked_for() -> Result<()> {
    run("asked", 2, &[]).map(drop)
}
