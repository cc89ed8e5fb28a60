//! Ranks that end, stall, or run other collectives: each remaining rank gets an error that names what it was doing.

use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use overdrive_ddp::{DdpError, DistributedDataParallel, ReduceOp};
use tch::{Device, Kind, Tensor};

use crate::harness::{Ended, Meeting, Rank, all_through, free_port, start};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);
/// How long ranks wait for a missing rank: long enough for live ranks on a busy machine.
const SHORT: Duration = Duration::from_secs(5);
/// Makes the rendezvous use the short timeout too, because a rank is missing from the start.
const IMPATIENT: (&str, &str) = ("OVERDRIVE_TEST_IMPATIENT", "");
/// Names a file that rank 1 creates once it is under way.
pub const READY: &str = "OVERDRIVE_TEST_READY";

fn is_of_rank(error: &DdpError, op: &str) -> Result<()> {
    ensure!(matches!(error, DdpError::TimedOut { .. } | DdpError::Lost { .. }), "{error:?}");
    ensure!(error.to_string().contains(op), "{error} does not name {op}");
    Ok(())
}

fn mark_ready() -> Result<()> {
    let path = std::env::var(READY)?;
    if !Path::new(&path).exists() {
        std::fs::write(path, "")?;
    }
    Ok(())
}

/// Succeeds when a sum fails with the expected error.
pub fn endless_sums(meeting: &Meeting) -> Result<()> {
    let group = meeting.group_with(SHORT, false)?;
    let mut tensor = Tensor::ones([100_000], FLOAT);
    loop {
        match group.all_reduce(&mut tensor, ReduceOp::Avg) {
            Ok(()) if meeting.rank == 1 => mark_ready()?,
            Ok(()) => {}
            Err(error) => {
                is_of_rank(&error, "all_reduce on rank")?;
                // The next collective fails too, at once or at the timeout.
                let next = group.barrier().err().context("the group works without a rank")?;
                return is_of_rank(&next, "barrier on rank");
            }
        }
    }
}

pub fn endless_training(meeting: &Meeting) -> Result<()> {
    let group = meeting.group_with(SHORT, false)?;
    let param = Tensor::ones([100_000], FLOAT).set_requires_grad(true);
    let params = vec![("w".to_owned(), param.shallow_clone())];
    let ddp = DistributedDataParallel::builder(&group).build_from(params, Vec::new())?;
    loop {
        let passed = ddp.forward(|| &param * 0.5).and_then(|outputs| ddp.backward(&outputs.sum(Kind::Float)));
        match passed {
            Ok(()) if meeting.rank == 1 => mark_ready()?,
            Ok(()) => {}
            Err(error) => return is_of_rank(&error, "on rank"),
        }
    }
}

/// Starts three ranks, kills the second by SIGKILL in the middle, and waits for the others to succeed.
fn killed(scenario: &str) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let ready = folder.path().join("ready");
    let ready_var = ready.display().to_string();
    let (port, started) = (free_port(), Instant::now());
    let mut ranks: Vec<Rank> =
        (0..3).map(|rank| start(scenario, rank, 3, port, &[(READY, &ready_var)])).collect::<Result<_>>()?;
    while !ready.exists() {
        if started.elapsed() > Duration::from_secs(60) || ranks[1].child.try_wait()?.is_some() {
            let mut victim = ranks.remove(1);
            victim.child.kill()?;
            let ended = victim.end(started)?;
            bail!("never under way: {}\n{}", ended.output, ended.errors);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut victim = ranks.remove(1);
    victim.child.kill()?;
    let victim = victim.end(started)?;
    ensure!(!victim.status.success() && !victim.output.contains("is through"), "the victim ended by itself");
    all_through(ranks, started).map(drop)
}

pub fn killed_in_collectives() -> Result<()> {
    killed("endless_sums")
}

pub fn killed_in_backward() -> Result<()> {
    killed("endless_training")
}

/// Rank 1 stays away from a collective until the others have given up.
pub fn stalls(meeting: &Meeting) -> Result<()> {
    let group = meeting.group_with(Duration::from_secs(2), false)?;
    let store = group.store();
    if meeting.rank == 1 {
        store.wait(&["0 is through", "2 is through"], Duration::from_secs(60))?;
        return Ok(());
    }
    let error = group
        .all_reduce(&mut Tensor::ones([4], FLOAT), ReduceOp::Sum)
        .err()
        .context("the missing rank went unnoticed")?;
    ensure!(matches!(&error, DdpError::TimedOut { context, .. } if context.rank == meeting.rank), "{error:?}");
    is_of_rank(&error, "all_reduce on rank")?;
    store.set(&format!("{} is through", meeting.rank), b"")?;
    if meeting.rank == 0 {
        // Rank 0 serves the store until the others are done with it.
        store.wait(&["2 is through"], Duration::from_secs(60))?;
        std::thread::sleep(Duration::from_millis(300));
    }
    Ok(())
}

pub fn stalls_in_backward(meeting: &Meeting) -> Result<()> {
    let group = meeting.group_with(Duration::from_secs(2), false)?;
    let param = Tensor::ones([10], FLOAT).set_requires_grad(true);
    let params = vec![("w".to_owned(), param.shallow_clone())];
    let ddp = DistributedDataParallel::builder(&group).build_from(params, Vec::new())?;
    let loss = ddp.forward(|| &param * 0.5)?.sum(Kind::Float);
    if meeting.rank == 1 {
        group.store().wait(&["0 is through"], Duration::from_secs(60))?;
        return Ok(());
    }
    let error = ddp.backward(&loss).err().context("the missing rank went unnoticed")?;
    ensure!(matches!(error, DdpError::TimedOut { .. }), "{error:?}");
    group.store().set("0 is through", b"")?;
    std::thread::sleep(Duration::from_millis(300));
    Ok(())
}

fn disagree(error: Option<DdpError>) -> Result<()> {
    let error = error.context("no error")?;
    ensure!(matches!(error, DdpError::Mismatch { .. }), "{error:?}");
    Ok(())
}

/// Reported only in groups that verify; without it, ranks hang or crash.
pub fn other_collective(meeting: &Meeting) -> Result<()> {
    let group = meeting.group_with(SHORT, true)?;
    let mut tensor = Tensor::ones([4], FLOAT);
    group.all_reduce(&mut tensor, ReduceOp::Sum)?;
    ensure!(tensor.double_value(&[0]) == 3.0);
    let ran =
        if meeting.rank == 1 { group.broadcast(&mut tensor, 0) } else { group.all_reduce(&mut tensor, ReduceOp::Sum) };
    disagree(ran.err())
}

pub fn other_shape(meeting: &Meeting) -> Result<()> {
    let group = meeting.group_with(SHORT, true)?;
    let mut tensor = Tensor::ones([4 + meeting.rank as i64], FLOAT);
    disagree(group.all_reduce(&mut tensor, ReduceOp::Sum).err())
}

pub fn monitored(meeting: &Meeting) -> Result<()> {
    let group = meeting.group_with(Duration::from_secs(30), false)?;
    group.monitored_barrier(Duration::from_secs(30), true)?;
    if meeting.rank != 0 {
        // Neither calls the barrier.
        group.store().wait(&["0 is through"], Duration::from_secs(60))?;
        return Ok(());
    }
    let error =
        group.monitored_barrier(Duration::from_secs(1), true).err().context("the missing rank went unnoticed")?;
    let DdpError::MissingRanks { ranks, .. } = &error else { bail!("{error:?}") };
    ensure!(ranks == &[1, 2], "{ranks:?}");
    group.store().set("0 is through", b"")?;
    std::thread::sleep(Duration::from_millis(300));
    Ok(())
}

/// Work that is dropped without waiting, and a group that is dropped with work under way.
pub fn dropped_work(meeting: &Meeting) -> Result<()> {
    let group = meeting.group_with(SHORT, false)?;
    drop(group.all_reduce_async(&mut Tensor::ones([4], FLOAT), ReduceOp::Sum)?);
    group.barrier()?;
    if meeting.rank == 0 {
        // Rank 1 runs none of these, so they are under way until their timeout.
        drop(group.all_reduce_async(&mut Tensor::ones([4], FLOAT), ReduceOp::Sum)?);
        drop(group.recv_async(&mut Tensor::ones([4], FLOAT), Some(1), 0)?);
        let work = group.all_reduce_async(&mut Tensor::ones([4], FLOAT), ReduceOp::Sum)?;
        let early = work.wait_for(Duration::from_millis(50)).err().context("the missing rank went unnoticed")?;
        ensure!(matches!(early, DdpError::TimedOut { .. }), "{early:?}");
        group.store().set("dropping", b"")?;
        drop(group);
        ensure!(!work.is_completed(), "dropping the group has waited for its work");
        // A handle may outlive its group.
        ensure!(work.wait().is_err());
        return Ok(());
    }
    group.store().get("dropping", Duration::from_secs(60)).map(drop).or(Ok(()))
}

/// A process that ends while work is under way: it exits at once, and successfully.
pub fn ends_with_work(meeting: &Meeting) -> Result<()> {
    let group = meeting.group_with(Duration::from_secs(60), false)?;
    if meeting.rank == 0 {
        drop(group.all_reduce_async(&mut Tensor::ones([4], FLOAT), ReduceOp::Sum)?);
        drop(group.recv_async(&mut Tensor::ones([4], FLOAT), Some(1), 0)?);
        return Ok(());
    }
    // Waits until the store ends with rank 0.
    let gone = group.store().get("never", Duration::from_secs(50)).err().context("it was set")?;
    ensure!(gone.kind() != overdrive_core::TorchErrorKind::Timeout, "rank 0 was held up: {gone}");
    Ok(())
}

fn errors_of(ended: &Ended) -> String {
    format!("{}{}", ended.output, ended.errors)
}

/// Two ranks with a WORLD_SIZE of three.
pub fn wrong_world_size() -> Result<()> {
    let (port, started) = (free_port(), Instant::now());
    let ranks: Vec<Rank> = (0..2).map(|rank| start("stalls", rank, 3, port, &[IMPATIENT])).collect::<Result<_>>()?;
    for (rank, ended) in ranks.into_iter().map(|rank| rank.end(started)).enumerate() {
        let ended = ended?;
        let said = errors_of(&ended);
        ensure!(!ended.status.success() && said.contains("could not meet the others"), "rank {rank}: {said}");
        ensure!(said.contains(&format!("rank {rank} of 3")) && said.contains("WORLD_SIZE"), "rank {rank}: {said}");
    }
    Ok(())
}

/// A single rank at a port where no store is served.
pub fn absent_rank() -> Result<()> {
    let (port, started) = (free_port(), Instant::now());
    let ended = start("stalls", 1, 2, port, &[IMPATIENT])?.end(started)?;
    let said = errors_of(&ended);
    ensure!(!ended.status.success() && said.contains("rank 1 of 2 could not meet"), "{said}");
    ensure!(said.contains(&format!("127.0.0.1:{port}")), "{said}");
    Ok(())
}

/// Another socket already listens on rank 0's port.
pub fn taken_port() -> Result<()> {
    let listener = TcpListener::bind("0.0.0.0:0")?;
    let port = listener.local_addr()?.port();
    let started = Instant::now();
    let ranks: Vec<Rank> = (0..2).map(|rank| start("stalls", rank, 2, port, &[IMPATIENT])).collect::<Result<_>>()?;
    for (rank, ended) in ranks.into_iter().map(|rank| rank.end(started)).enumerate() {
        let ended = ended?;
        let said = errors_of(&ended);
        ensure!(!ended.status.success() && said.contains("could not meet"), "rank {rank}: {said}");
        ensure!(rank != 0 || said.contains("EADDRINUSE") || said.contains("in use"), "rank 0: {said}");
    }
    drop(listener);
    Ok(())
}
