//! Collectives, and handles of collectives under way.

use std::ptr::{self, NonNull};
use std::time::Duration;

use super::group::{ProcessGroup, int};
use super::millis;
use crate::error::{Error, check};
use crate::raw_c10d as raw;
use crate::tensor_list::TensorList;

/// How a reduction combines the ranks' values.
///
/// # Source
/// `torch.distributed.ReduceOp`
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum ReduceOp {
    /// Their sum.
    Sum,
    /// Their mean (NCCL).
    Avg,
    /// Their product.
    Product,
    /// Their minimum.
    Min,
    /// Their maximum.
    Max,
    /// Bitwise and.
    Band,
    /// Bitwise or.
    Bor,
    /// Bitwise exclusive or.
    Bxor,
    /// The sum of the values times a factor (NCCL).
    PremulSum(f64),
}

/// What a [`Collective`] does, and with whom.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum CollectiveKind {
    /// Reduces the outputs in place, on all ranks.
    AllReduce(ReduceOp),
    /// The same for several tensors of one dtype at once.
    AllReduceCoalesced(ReduceOp),
    /// Reduces the outputs in place, for one rank.
    Reduce(ReduceOp, usize),
    /// Overwrites the outputs with one rank's.
    Broadcast(usize),
    /// Copies the input of every rank to one output each.
    AllGather,
    /// Copies the inputs of all ranks to one output.
    AllGatherInto,
    /// Reduces one input per rank; each rank gets the result of its own.
    ReduceScatter(ReduceOp),
    /// The same from one input.
    ReduceScatterInto(ReduceOp),
    /// Copies the input of every rank to the outputs of one rank.
    Gather(usize),
    /// Copies the inputs of one rank to the output of each rank.
    Scatter(usize),
    /// Sends one input to each rank, and receives an output from each (NCCL).
    AllToAll,
    /// Sends a part of one input to each rank, and receives a part of one output from each.
    AllToAllSingle,
    /// Sends the inputs to a rank.
    Send(usize),
    /// Receives the outputs from a rank.
    Recv(usize),
    /// Receives the outputs from whichever rank sends first.
    RecvAny,
    /// Waits for all ranks.
    Barrier,
}

/// A collective to start.
#[derive(Debug)]
pub struct Collective<'a> {
    /// What it does.
    pub kind: CollectiveKind,
    /// What is read.
    pub inputs: Option<&'a TensorList>,
    /// What is written.
    pub outputs: Option<&'a TensorList>,
    /// For [`CollectiveKind::AllToAllSingle`], the rows for and from each rank; `None` for equal parts.
    pub splits: Option<(&'a [i64], &'a [i64])>,
    /// Distinguishes sends and receives between two ranks.
    pub tag: i32,
    /// A timeout instead of the group's.
    pub timeout: Option<Duration>,
}

/// A collective under way. Dropping it neither waits nor stops it: its tensors stay alive until it is done. For a send
/// or receive, dropping costs a thread, so wait for those.
///
/// # Source
/// `c10d::Work`
#[derive(Debug)]
pub struct Work(NonNull<raw::Work>);

// SAFETY: a work is counted atomically and locks around its state.
unsafe impl Send for Work {}

impl ProcessGroup {
    /// Starts a collective. All ranks start the same ones in the same order.
    ///
    /// # Errors
    /// When the backend refuses the arguments.
    ///
    /// # Syncs
    /// No; groups made with [`verify`](super::GroupOptions::verify) wait for all ranks.
    pub fn start(&self, collective: &Collective<'_>) -> Result<Work, Error> {
        use CollectiveKind as K;
        let (kind, op, peer) = match collective.kind {
            K::AllReduce(op) => (raw::ALL_REDUCE, Some(op), 0),
            K::AllReduceCoalesced(op) => (raw::ALL_REDUCE_COALESCED, Some(op), 0),
            K::Reduce(op, root) => (raw::REDUCE, Some(op), root),
            K::Broadcast(root) => (raw::BROADCAST, None, root),
            K::AllGather => (raw::ALL_GATHER, None, 0),
            K::AllGatherInto => (raw::ALL_GATHER_INTO, None, 0),
            K::ReduceScatter(op) => (raw::REDUCE_SCATTER, Some(op), 0),
            K::ReduceScatterInto(op) => (raw::REDUCE_SCATTER_INTO, Some(op), 0),
            K::Gather(root) => (raw::GATHER, None, root),
            K::Scatter(root) => (raw::SCATTER, None, root),
            K::AllToAll => (raw::ALL_TO_ALL, None, 0),
            K::AllToAllSingle => (raw::ALL_TO_ALL_SINGLE, None, 0),
            K::Send(to) => (raw::SEND, None, to),
            K::Recv(from) => (raw::RECV, None, from),
            K::RecvAny => (raw::RECV_ANY, None, 0),
            K::Barrier => (raw::BARRIER, None, 0),
        };
        let list = |list: Option<&TensorList>| list.map_or(ptr::null(), TensorList::as_ptr);
        let (input_splits, output_splits) = collective
            .splits
            .map_or((ptr::null(), ptr::null()), |(inputs, outputs)| (inputs.as_ptr(), outputs.as_ptr()));
        let (reduce_op, factor) = numbers(op.unwrap_or(ReduceOp::Sum));
        let wanted = raw::Collective {
            kind,
            reduce_op,
            factor,
            peer: int(peer)?,
            tag: collective.tag,
            timeout_ms: collective.timeout.map_or(0, millis),
            inputs: list(collective.inputs),
            outputs: list(collective.outputs),
            input_splits,
            output_splits,
        };
        self.check(collective)?;
        let mut out = ptr::null_mut();
        // SAFETY: the group, the lists and the splits, one per rank, are borrowed for the length of the call; libtorch
        // holds references to the tensors until the work is done.
        check(|err| unsafe { raw::od_collective_start(self.as_ptr(), &wanted, &mut out, err) })?;
        NonNull::new(out).map(Work).ok_or_else(|| Error::refused("libtorch returned no work"))
    }

    /// Sends and receives over NCCL, all at once: one tensor, the other rank, and whether it is received, each.
    ///
    /// # Errors
    /// Without NCCL, or when another end is not another rank of the group.
    ///
    /// # Syncs
    /// No. The first one of a group waits for all of its members, which connect.
    pub fn start_batch(&self, tensors: &TensorList, ends: &[(usize, bool)]) -> Result<Work, Error> {
        if tensors.len() != ends.len() || ends.is_empty() {
            return Err(Error::refused(format!("{} tensors for {} sends and receives", tensors.len(), ends.len())));
        }
        if let Some((rank, _)) = ends.iter().find(|(rank, _)| *rank >= self.size() || *rank == self.rank) {
            let size = self.size();
            return Err(Error::refused(format!(
                "the other end is rank {rank}, but should be another rank below {size}"
            )));
        }
        let peers = ends.iter().map(|(rank, _)| int(*rank)).collect::<Result<Vec<_>, _>>()?;
        let receives: Vec<i32> = ends.iter().map(|(_, receives)| i32::from(*receives)).collect();
        let mut out = ptr::null_mut();
        // SAFETY: the group and the list are live, and both arrays have one number a tensor; libtorch holds references to
        // the tensors until the work is done.
        check(|err| unsafe {
            let (peers, receives) = (peers.as_ptr(), receives.as_ptr());
            raw::od_batch_start(self.as_ptr(), tensors.as_ptr(), peers, receives, &mut out, err)
        })?;
        NonNull::new(out).map(Work).ok_or_else(|| Error::refused("libtorch returned no work"))
    }

    /// Checks numbers that the backends do not check.
    fn check(&self, collective: &Collective<'_>) -> Result<(), Error> {
        use CollectiveKind as K;
        let (size, refused) = (self.size(), |reason: String| Err(Error::refused(reason)));
        if let K::Reduce(_, rank) | K::Broadcast(rank) | K::Gather(rank) | K::Scatter(rank) = collective.kind
            && rank >= size
        {
            return refused(format!("the root is rank {rank}, but should be below the group's size of {size}"));
        }
        if let K::Send(rank) | K::Recv(rank) = collective.kind
            && (rank >= size || rank == self.rank)
        {
            return refused(format!("the other end is rank {rank}, but should be another rank below {size}"));
        }
        let Some((inputs, outputs)) = collective.splits else { return Ok(()) };
        if inputs.len() != size || outputs.len() != size {
            let found = (inputs.len(), outputs.len());
            return refused(format!("{found:?} splits for a group of {size}, but there should be one per rank"));
        }
        Ok(())
    }
}

impl Work {
    /// Whether [`wait`](Self::wait) would return at once. Sends and receives over Gloo report this only after a wait.
    pub fn is_completed(&self) -> bool {
        // SAFETY: the handle is live.
        unsafe { raw::od_work_is_completed(self.0.as_ptr()) != 0 }
    }

    /// Waits until it is done: the host waits for Gloo, the current stream for NCCL.
    ///
    /// # Errors
    /// When a member has exited, or it is not done within `timeout`; `None`: within the collective's own timeout.
    ///
    /// # Syncs
    /// Over Gloo, yes.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<(), Error> {
        // SAFETY: the handle is live.
        check(|err| unsafe { raw::od_work_wait(self.0.as_ptr(), timeout.map_or(0, millis), err) })
    }

    /// Waits for at most `timeout`. NCCL's work goes on where it is not done by then, and can be waited for again; in
    /// [`wait`](Self::wait) a timeout aborts the group.
    ///
    /// # Errors
    /// When a member has exited, or it is not done within `timeout`.
    ///
    /// # Syncs
    /// Yes.
    pub fn wait_for(&self, timeout: Duration) -> Result<(), Error> {
        // SAFETY: the handle is live.
        check(|err| unsafe { raw::od_work_wait_for(self.0.as_ptr(), millis(timeout), err) })
    }

    /// The rank from which a [`CollectiveKind::RecvAny`] has received, after a wait.
    ///
    /// # Errors
    /// For other collectives.
    pub fn source_rank(&self) -> Result<usize, Error> {
        let mut rank = -1;
        // SAFETY: the handle is live.
        check(|err| unsafe { raw::od_work_source_rank(self.0.as_ptr(), &mut rank, err) })?;
        usize::try_from(rank).map_err(|_| Error::refused("nothing has been received yet"))
    }

    pub(super) fn as_ptr(&self) -> *const raw::Work {
        self.0.as_ptr()
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        // SAFETY: the handle is ours, and not used after this.
        unsafe { raw::od_work_free(self.0.as_ptr()) }
    }
}

/// `c10d::ReduceOp`'s number, and the factor.
fn numbers(op: ReduceOp) -> (i32, f64) {
    match op {
        ReduceOp::Sum => (0, 1.0),
        ReduceOp::Avg => (1, 1.0),
        ReduceOp::Product => (2, 1.0),
        ReduceOp::Min => (3, 1.0),
        ReduceOp::Max => (4, 1.0),
        ReduceOp::Band => (5, 1.0),
        ReduceOp::Bor => (6, 1.0),
        ReduceOp::Bxor => (7, 1.0),
        ReduceOp::PremulSum(factor) => (8, factor),
    }
}
