//! How groups and works end: closed, dropped, given up, and made anew.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::{Context, Result, ensure};
use overdrive::prelude::*;
use overdrive_ddp::{GroupFailure, ReduceOp, flight_record};

use super::super::PATIENCE;
use super::super::processes::Meeting;
use super::rank::{Rank, leave, name, released, stay_away, tell};
use super::{PAUSE, SHORT, SIZE};

/// Work and a group that are dropped while they are under way.
pub fn drops(rank: Rank, meeting: &Meeting, what: &str) -> Result<()> {
    let Rank { group, mut sum, .. } = rank;
    let work = |sum: &mut Tensor| group.all_reduce_async(sum, ReduceOp::Sum);
    if what == "closed" {
        let pair = group.new_group(&[0, 1, 2])?.context("every rank is a member")?;
        pair.all_reduce(&mut sum, ReduceOp::Sum)?;
        drop(work(&mut sum)?);
        group.close()?;
        ensure!(sum.double_value(&[0]) == (SIZE * SIZE) as f64, "{sum}");
        let ended = [&group, &pair].map(|group| group.all_reduce(&mut sum.copy(), ReduceOp::Sum));
        for result in ended {
            let error = result.err().context("a closed group works")?;
            ensure!(name(&error) == "Ended", "{error}");
        }
        // Nothing is left to end.
        group.close()?;
        group.abort()?;
        return tell(meeting, "closed");
    }
    if what == "finished" {
        drop(work(&mut sum)?);
        let last = work(&mut sum)?;
        drop(group);
        last.wait()?;
        ensure!(sum.double_value(&[0]) == (SIZE * SIZE) as f64, "{sum}");
        return tell(meeting, "nothing");
    }
    if group.rank() == 1 {
        if what == "lost" { std::process::abort() } else { stay_away() }
    }
    if what == "lost" {
        let error = group.barrier().err().context("a rank is missing")?;
        ensure!(name(&error) == "Lost", "{error}");
        drop(group);
        return tell(meeting, "dropped");
    }
    if what == "in a panic" {
        // Its timeout is longer than anybody waits for this rank.
        let under_way = work(&mut sum)?;
        let panicking = AssertUnwindSafe(move || {
            let _dropped = (group, under_way);
            panic!("planted");
        });
        ensure!(catch_unwind(panicking).is_err());
        return tell(meeting, "dropped");
    }
    if what == "stalled" {
        group.set_timeout(SHORT)?;
        let under_way = work(&mut sum)?;
        drop(group);
        drop(under_way);
        return tell(meeting, "dropped");
    }
    if what == "timed out" {
        group.set_timeout(SHORT)?;
        let error = group.barrier().err().context("a rank is missing")?;
        ensure!(name(&error) == "TimedOut", "{error}");
        drop(group);
        return tell(meeting, "dropped");
    }
    if what == "not closed" {
        group.set_timeout(SHORT)?;
        let _under_way = work(&mut sum)?;
        let error = group.close().err().context("a rank is missing")?;
        let next = group.barrier().err().context("a closed group works")?;
        group.close()?;
        return tell(meeting, &format!("{}, then {}", name(&error), name(&next)));
    }
    let under_way = work(&mut sum)?;
    ensure!(!under_way.is_completed(), "a rank is missing");
    group.abort()?;
    let next = group.all_reduce(&mut sum, ReduceOp::Sum).err().context("an aborted group works")?;
    drop((group, under_way));
    tell(meeting, name(&next))
}

/// Rank 1 comes late to its first exchange with rank 2, which has a short timeout; so has rank 0, in the group of all.
pub fn comes_late(rank: &mut Rank, meeting: &Meeting, what: &str) -> Result<()> {
    let Rank { group, sum, .. } = rank;
    let pair = if what == "sub-group" { group.new_group(&[1, 2])? } else { None };
    match group.rank() {
        0 => {
            group.set_timeout(SHORT)?;
            let error = group.barrier().err().context("two ranks are missing")?;
            // The others have had the same time again.
            ensure!(group.store().wait(&["never"], SHORT).is_err(), "nobody sets it");
            return leave(meeting, name(&error));
        }
        1 => {
            while !released(&meeting.file).exists() {
                std::thread::sleep(PAUSE);
            }
        }
        _ => pair.as_ref().unwrap_or(group).set_timeout(SHORT)?,
    }
    match (&pair, group.rank()) {
        (Some(pair), _) => pair.all_reduce(sum, ReduceOp::Sum)?,
        (None, 1) => group.send(sum, 2, 0)?,
        (None, _) => drop(group.recv(sum, Some(1), 0)?),
    }
    ensure!(sum.double_value(&[0]) == if pair.is_some() { 2.0 } else { 1.0 }, "{sum}");
    leave(meeting, "done")
}

/// Rank 1 comes when rank 0 has given up a wait, which aborts nothing.
pub fn waits_again(rank: &mut Rank, meeting: &Meeting) -> Result<()> {
    let Rank { group, sum, .. } = rank;
    if group.rank() == 1 {
        while !released(&meeting.file).exists() {
            std::thread::sleep(PAUSE);
        }
    }
    let work = group.all_reduce_async(sum, ReduceOp::Sum)?;
    if group.rank() == 0 {
        for _ in 0..2 {
            let error = work.wait_for(PAUSE).err().context("a rank is missing")?;
            ensure!(name(&error) == "TimedOut", "{error}");
        }
        fs::write(released(&meeting.file), "")?;
    }
    work.wait_for(PATIENCE)?;
    work.wait()?;
    ensure!(sum.double_value(&[0]) == SIZE as f64, "{sum}");
    group.close()?;
    tell(meeting, "done")
}

/// Those that live abort the group, and go on in a new one.
pub fn goes_on_without_a_rank(rank: &mut Rank, meeting: &Meeting) -> Result<()> {
    let Rank { group, sum, device, .. } = rank;
    if group.rank() == 1 {
        stay_away();
    }
    group.set_timeout(SHORT)?;
    ensure!(group.failure()?.is_none());
    let _under_way = group.all_reduce_async(sum, ReduceOp::Sum)?;
    // The watchdog finds it.
    while group.failure()?.is_none() {
        std::thread::sleep(PAUSE);
    }
    ensure!(group.failure()? == Some(GroupFailure::TimedOut));
    let record = flight_record(true, true)?;
    ensure!(record.contains("nccl:all_reduce"), "{record}");
    group.abort()?;
    let rest = group.new_group(&[0, 2])?.context("this rank is a member")?;
    rest.set_timeout(PATIENCE)?;
    *sum = Tensor::ones([8], (Kind::Float, *device));
    rest.all_reduce(sum, ReduceOp::Sum)?;
    ensure!(sum.double_value(&[0]) == 2.0, "{sum}");
    rest.close()?;
    tell(meeting, "went on")
}
