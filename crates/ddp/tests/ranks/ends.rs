//! Groups over Gloo that are closed, and several sends and receives as one work.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use overdrive_ddp::{DdpError, P2pOp, ReduceOp};
use tch::{Device, Kind, Tensor};

use crate::harness::{Meeting, PATIENCE, all_through, free_port, start};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let (rank, size) = (group.rank(), group.size());
    let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
    for waits_first in [false, true] {
        let (sent, mut received) = (Tensor::full([5], rank as i64, FLOAT), Tensor::zeros([5], FLOAT));
        // The send comes first: a wait for it alone would be over too early.
        let work = group.batch_isend_irecv(&mut [P2pOp::Send(&sent, next), P2pOp::Recv(&mut received, before)])?;
        if waits_first {
            work.wait_for(Duration::MAX)?;
        } else {
            work.wait()?;
        }
        ensure!(received.double_value(&[4]) == before as f64, "{received}");
    }
    ensure!(group.batch_isend_irecv(&mut []).is_err());

    let all: Vec<usize> = (0..size).collect();
    let sub = group.new_group(&all)?.context("every rank is a member")?;
    let inner = sub.new_group(&all)?.context("every rank is a member")?;
    let mut sum = Tensor::ones([4], FLOAT);
    drop(inner.all_reduce_async(&mut sum, ReduceOp::Sum)?);
    sub.close()?;
    // What was under way is done.
    ensure!(sum.double_value(&[3]) == size as f64, "{sum}");
    for ended in [&sub, &inner] {
        let error = ended.all_reduce(&mut sum, ReduceOp::Sum).err().context("a closed group works")?;
        ensure!(matches!(error, DdpError::Ended { .. }) && error.to_string().contains("was closed"), "{error}");
    }
    sub.close()?;
    sub.abort()?;

    // Rank 1 never comes, and the work would wait for it much longer than the group does.
    let late = group.new_group(&all)?.context("every rank is a member")?;
    if rank == 0 {
        let _under_way = late.all_reduce_async(&mut sum, ReduceOp::Sum)?;
        late.set_timeout(Duration::from_millis(20))?;
        let error = late.close().err().context("a rank is missing")?;
        ensure!(matches!(error, DdpError::TimedOut { .. }), "{error}");
        let next = late.barrier().err().context("a closed group works")?;
        ensure!(matches!(next, DdpError::Ended { .. }), "{next}");
        group.store().set("0 is through", b"")?;
    }
    group.store().wait(&["0 is through"], PATIENCE)?;
    group.barrier()?;
    Ok(group.close()?)
}

/// Rank 1 is late: rank 0 has dropped the group before rank 1 has connected to it.
pub fn late(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let all: Vec<usize> = (0..group.size()).collect();
    // The group's own keys are not its users'.
    ensure!(group.store().add("connected", 1)? <= group.size() as i64);
    // Which of the two is faster differs from group to group.
    for _ in 0..200 {
        drop(group.new_group(&all)?.context("every rank is a member")?);
    }
    for _ in 0..50 {
        group.new_group(&all)?.context("every rank is a member")?.close()?;
    }
    Ok(group.close()?)
}

/// Rank 0 drops groups that rank 1 has not begun to make, and asks the store meanwhile.
pub fn held(meeting: &Meeting) -> Result<()> {
    // Shorter than the group waits at its end, and longer than an answer takes unless the machine is very busy.
    const SHORT: Duration = Duration::from_millis(300);
    let group = meeting.group()?;
    let all: Vec<usize> = (0..group.size()).collect();
    let (store, mut answers) = (group.store(), Vec::new());
    store.set("known", b"")?;
    for round in 0..5 {
        let asked = format!("asked {round}");
        if group.rank() > 0 {
            store.wait(&[asked.as_str()], PATIENCE)?;
        }
        drop(group.new_group(&all)?.context("every rank is a member")?);
        if group.rank() == 0 {
            // The thread that waits for rank 1 has begun, or will begin and show nothing.
            answers.push((0..10).try_for_each(|_| {
                sleep(Duration::from_millis(10));
                store.get("known", SHORT).map(drop)
            }));
            store.set(&asked, b"")?;
        }
    }
    ensure!(group.rank() > 0 || answers.iter().any(Result::is_ok), "{answers:?}");
    Ok(group.close()?)
}

/// Gloo connects at the first collective here, so rank 0 makes the group without rank 1.
pub fn store_is_left() -> Result<()> {
    let (port, started) = (free_port(), Instant::now());
    let ranks = (0..2).map(|rank| start("held", rank, 2, port, &[("TORCH_GLOO_LAZY_INIT", "1")]));
    let ranks = ranks.collect::<Result<Vec<_>>>()?;
    all_through(ranks, started).map(drop)
}
