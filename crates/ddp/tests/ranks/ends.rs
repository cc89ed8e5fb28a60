//! Groups over Gloo that are closed, and several sends and receives as one work.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use overdrive_ddp::{DdpError, P2pOp, ReduceOp};
use tch::{Device, Kind, Tensor};

use crate::harness::{Meeting, PATIENCE};

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
    // Which of the two is faster differs from group to group.
    for _ in 0..200 {
        drop(group.new_group(&all)?.context("every rank is a member")?);
    }
    for _ in 0..50 {
        group.new_group(&all)?.context("every rank is a member")?.close()?;
    }
    Ok(group.close()?)
}
