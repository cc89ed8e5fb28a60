//! Ranks that end, stall, or run other collectives: each remaining rank gets an error that names what it was doing.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use overdrive_ddp::{DdpError, DistributedDataParallel, ProcessGroup, ReduceOp, Store};
use tch::{Device, Kind, Tensor};

use crate::harness::{Ended, Meeting, PATIENCE, Rank, all_through, free_port, run, start};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);
/// How long ranks wait for a missing rank. On a busy machine they may give a live rank up.
const SHORT: Duration = Duration::from_secs(5);
/// How long they wait for a rank that stays away until they have given it up.
const SHORTER: Duration = Duration::from_secs(2);
/// Makes the rendezvous use the short timeout too, because a rank is missing from the start.
const IMPATIENT: (&str, &str) = ("OVERDRIVE_TEST_IMPATIENT", "");
/// Names a file. Each rank appends its number, and creates that file once it is under way.
pub const READY: &str = "OVERDRIVE_TEST_READY";
/// Names a file that rank 0 creates when rank 1 may end.
const GO: &str = "OVERDRIVE_TEST_GO";
/// Set only for the rank that will be killed.
const VICTIM: &str = "OVERDRIVE_TEST_VICTIM";

fn is_of_rank(error: &DdpError, op: &str) -> Result<()> {
    ensure!(matches!(error, DdpError::TimedOut { .. } | DdpError::Lost { .. }), "{error:?}");
    ensure!(error.to_string().contains(op), "{error} does not name {op}");
    Ok(())
}

/// Called after the first success. From here on the rank waits only for a short time.
fn be_ready(meeting: &Meeting, group: &ProcessGroup) -> Result<()> {
    group.set_timeout(SHORT)?;
    Ok(std::fs::write(format!("{}.{}", std::env::var(READY)?, meeting.rank), "")?)
}

/// Whether all ranks are.
pub fn are_ready(path: &Path, ranks: usize) -> bool {
    (0..ranks).all(|rank| path.with_extension(rank.to_string()).exists())
}

/// On a busy machine, ranks may give each other up before the victim is killed: then it is killed here.
fn wait_if_victim() {
    while std::env::var_os(VICTIM).is_some() {
        std::thread::park();
    }
}

/// Succeeds when a sum fails with the expected error.
pub fn endless_sums(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let mut tensor = Tensor::ones([100_000], FLOAT);
    group.all_reduce(&mut tensor, ReduceOp::Avg)?;
    be_ready(meeting, &group)?;
    loop {
        match group.all_reduce(&mut tensor, ReduceOp::Avg) {
            Ok(()) => {}
            Err(error) => {
                wait_if_victim();
                is_of_rank(&error, "all_reduce on rank")?;
                // The next collective fails too, at once or at the timeout.
                let next = group.barrier().err().context("the group works without a rank")?;
                return is_of_rank(&next, "barrier on rank");
            }
        }
    }
}

pub fn endless_training(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let param = Tensor::ones([100_000], FLOAT).set_requires_grad(true);
    let params = vec![("w".to_owned(), param.shallow_clone())];
    let ddp = DistributedDataParallel::builder(&group).build_from(params, Vec::new())?;
    let pass = || ddp.forward(|| &param * 0.5).and_then(|outputs| ddp.backward(&outputs.sum(Kind::Float)));
    pass()?;
    be_ready(meeting, &group)?;
    loop {
        if let Err(error) = pass() {
            wait_if_victim();
            return is_of_rank(&error, "on rank");
        }
    }
}

/// Starts three ranks, kills the second by SIGKILL in the middle, and waits for the others to succeed.
fn killed(scenario: &str) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let ready = folder.path().join("ready");
    let ready_var = ready.display().to_string();
    let (port, started) = (free_port(), Instant::now());
    let vars = [(READY, &*ready_var), (VICTIM, "")];
    let start = |rank| start(scenario, rank, 3, port, &vars[..if rank == 1 { 2 } else { 1 }]);
    let mut ranks: Vec<Rank> = (0..3).map(start).collect::<Result<_>>()?;
    while !are_ready(&ready, 3) {
        if started.elapsed() > PATIENCE || ranks[1].try_wait()?.is_some() {
            let mut victim = ranks.remove(1);
            victim.kill()?;
            let ended = victim.end(started)?;
            bail!("never under way: {}\n{}", ended.output, ended.errors);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut victim = ranks.remove(1);
    victim.kill()?;
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

/// Tells the others that this rank is done; nothing that it does in the store comes after that.
fn is_done(meeting: &Meeting, store: &Store) -> Result<()> {
    Ok(store.set(&format!("{} is done", meeting.rank), b"")?)
}

/// Rank 0 serves the store until the others are done with it.
fn serve_until_done(store: &Store, others: &[usize]) -> Result<()> {
    let done: Vec<String> = others.iter().map(|rank| format!("{rank} is done")).collect();
    Ok(store.wait(&done.iter().map(String::as_str).collect::<Vec<_>>(), PATIENCE)?)
}

const TIMED_OUT: &str = "the time was over";

/// Rank 1 stays away from a collective until the others have given up.
pub fn stalls(meeting: &Meeting) -> Result<()> {
    let group = meeting.group_with(SHORTER, false)?;
    let store = group.store();
    if meeting.rank == 1 {
        store.wait(&["0 is through", "2 is through"], PATIENCE)?;
        return is_done(meeting, store);
    }
    let error = group
        .all_reduce(&mut Tensor::ones([4], FLOAT), ReduceOp::Sum)
        .err()
        .context("the missing rank went unnoticed")?;
    is_of_rank(&error, &format!("all_reduce on rank {} of 3", meeting.rank))?;
    if matches!(error, DdpError::TimedOut { .. }) {
        println!("{TIMED_OUT}");
    }
    store.set(&format!("{} is through", meeting.rank), b"")?;
    if meeting.rank == 0 { serve_until_done(store, &[1, 2]) } else { is_done(meeting, store) }
}

/// The first to give up closes its connections, so a rank that comes later, on a busy machine, loses it.
pub fn stalled() -> Result<()> {
    let ended = run("stalls", 3)?;
    ensure!(ended.iter().any(|rank| rank.output.contains(TIMED_OUT)), "no rank gave up because of its timeout");
    Ok(())
}

pub fn stalls_in_backward(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let param = Tensor::ones([10], FLOAT).set_requires_grad(true);
    let params = vec![("w".to_owned(), param.shallow_clone())];
    let ddp = DistributedDataParallel::builder(&group).build_from(params, Vec::new())?;
    let loss = ddp.forward(|| &param * 0.5)?.sum(Kind::Float);
    if meeting.rank == 1 {
        group.store().wait(&["0 is through"], PATIENCE)?;
        return is_done(meeting, group.store());
    }
    group.set_timeout(SHORTER)?;
    let error = ddp.backward(&loss).err().context("the missing rank went unnoticed")?;
    ensure!(matches!(error, DdpError::TimedOut { .. }), "{error:?}");
    group.store().set("0 is through", b"")?;
    serve_until_done(group.store(), &[1])
}

fn disagree(error: Option<DdpError>) -> Result<()> {
    let error = error.context("no error")?;
    ensure!(matches!(error, DdpError::Mismatch { .. }), "{error:?}");
    Ok(())
}

/// Reported only in groups that verify; without it, ranks hang or crash.
pub fn other_collective(meeting: &Meeting) -> Result<()> {
    let group = meeting.group_with(PATIENCE, true)?;
    let mut tensor = Tensor::ones([4], FLOAT);
    group.all_reduce(&mut tensor, ReduceOp::Sum)?;
    ensure!(tensor.double_value(&[0]) == 3.0);
    let ran =
        if meeting.rank == 1 { group.broadcast(&mut tensor, 0) } else { group.all_reduce(&mut tensor, ReduceOp::Sum) };
    disagree(ran.err())
}

pub fn other_shape(meeting: &Meeting) -> Result<()> {
    let group = meeting.group_with(PATIENCE, true)?;
    let mut tensor = Tensor::ones([4 + meeting.rank as i64], FLOAT);
    disagree(group.all_reduce(&mut tensor, ReduceOp::Sum).err())
}

pub fn monitored(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    group.monitored_barrier(PATIENCE, true)?;
    if meeting.rank != 0 {
        // Neither calls the barrier.
        group.store().wait(&["0 is through"], PATIENCE)?;
        return is_done(meeting, group.store());
    }
    let error =
        group.monitored_barrier(Duration::from_secs(1), true).err().context("the missing rank went unnoticed")?;
    let DdpError::MissingRanks { ranks, .. } = &error else { bail!("{error:?}") };
    ensure!(ranks == &[1, 2], "{ranks:?}");
    group.store().set("0 is through", b"")?;
    serve_until_done(group.store(), &[1, 2])
}

/// Work that is dropped without waiting, and a group that is dropped with work under way.
pub fn dropped_work(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    drop(group.all_reduce_async(&mut Tensor::ones([4], FLOAT), ReduceOp::Sum)?);
    group.barrier()?;
    if meeting.rank == 0 {
        // Rank 1 runs none of these, so they are under way until it ends.
        let go = PathBuf::from(std::env::var(GO)?);
        drop(group.all_reduce_async(&mut Tensor::ones([4], FLOAT), ReduceOp::Sum)?);
        drop(group.recv_async(&mut Tensor::ones([4], FLOAT), Some(1), 0)?);
        let work = group.all_reduce_async(&mut Tensor::ones([4], FLOAT), ReduceOp::Sum)?;
        let early = work.wait_for(Duration::from_millis(50)).err().context("the missing rank went unnoticed")?;
        ensure!(matches!(early, DdpError::TimedOut { .. }), "{early:?}");
        drop(group);
        ensure!(!work.is_completed(), "dropping the group has waited for its work");
        std::fs::write(go, "")?;
        // A handle may outlive its group.
        ensure!(work.wait().is_err());
        return Ok(());
    }
    // Not by the store, which ends with rank 0's group.
    let go = PathBuf::from(std::env::var(GO)?);
    while !go.exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

pub fn dropped() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let go = folder.path().join("go").display().to_string();
    let (port, started) = (free_port(), Instant::now());
    let ranks = (0..2).map(|rank| start("dropped_work", rank, 2, port, &[(GO, &go)]));
    all_through(ranks.collect::<Result<_>>()?, started).map(drop)
}

/// A process that ends while work is under way: it exits at once, and successfully.
pub fn ends_with_work(meeting: &Meeting) -> Result<()> {
    let group = meeting.group_with(2 * PATIENCE, false)?;
    if meeting.rank == 0 {
        drop(group.all_reduce_async(&mut Tensor::ones([4], FLOAT), ReduceOp::Sum)?);
        drop(group.recv_async(&mut Tensor::ones([4], FLOAT), Some(1), 0)?);
        return Ok(());
    }
    // Waits until the store ends with rank 0.
    let gone = group.store().get("never", PATIENCE).err().context("it was set")?;
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
        // The last one if rank 0 gets no CPU to listen within the timeout.
        let reasons = ["EADDRINUSE", "in use", "does another program use that port"];
        ensure!(rank != 0 || reasons.iter().any(|reason| said.contains(reason)), "rank 0: {said}");
    }
    drop(listener);
    Ok(())
}
