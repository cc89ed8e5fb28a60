//! Each rank sends to the next one, and receives from the one before.

use anyhow::{Result, ensure};
use overdrive::prelude::*;
use overdrive_ddp::{Backend, P2pOp};

use super::group;
use super::processes::{Meeting, run};

const RANKS: usize = 3;

/// Over NCCL, sends before receives would wait without an end: they hold the stream one after the other.
pub fn scenario(meeting: &Meeting) -> Result<()> {
    for backend in [Backend::Nccl, Backend::Gloo] {
        let meeting = Meeting {
            file: meeting.file.with_extension(format!("{backend:?}")),
            arguments: Vec::new(),
            rank: meeting.rank,
            size: meeting.size,
        };
        let group = group(&meeting, backend)?;
        let (rank, size) = (group.rank(), group.size());
        let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
        let options = (Kind::Float, group.device());
        let sent = Tensor::full([5], rank as f64, options);
        let mut received = Tensor::zeros([5], options);
        for _ in 0..3 {
            let mut ops = [P2pOp::Send(&sent, next), P2pOp::Recv(&mut received, before)];
            group.batch_isend_irecv(&mut ops)?.wait()?;
            ensure!(received.double_value(&[4]) == before as f64, "{backend:?}: {received}");
            let _ = received.zero_();
        }
        ensure!(
            group.batch_isend_irecv(&mut []).is_err()
                && group.batch_isend_irecv(&mut [P2pOp::Send(&sent, rank)]).is_err()
        );
        group.close()?;
    }
    Ok(())
}

pub fn a_ring_sends_and_receives_in_one_batch() -> Result<()> {
    run("ring", RANKS, &[]).map(drop)
}
