//! Several sends and receives at once.

use overdrive_ffi::TensorList;
use tch::Tensor;

use crate::check;
use crate::error::DdpError;
use crate::group::ProcessGroup;
use crate::work::Work;

/// A send or a receive of [`ProcessGroup::batch_isend_irecv`].
///
/// # Source
/// `torch.distributed.P2POp`
#[derive(Debug)]
pub enum P2pOp<'a> {
    /// Sends a tensor to a rank.
    Send(&'a Tensor, usize),
    /// Overwrites a tensor with one that a rank sends.
    Recv(&'a mut Tensor, usize),
}

impl P2pOp<'_> {
    fn tensor(&self) -> &Tensor {
        match self {
            Self::Send(tensor, _) => tensor,
            Self::Recv(tensor, _) => tensor,
        }
    }

    fn end(&self) -> (usize, bool) {
        match self {
            Self::Send(_, to) => (*to, false),
            Self::Recv(_, from) => (*from, true),
        }
    }
}

impl ProcessGroup {
    /// Sends and receives, in any order among the ranks: in a ring, each rank sends to the next one and receives from
    /// the one before. Over NCCL, a [`send_async`](Self::send_async) before a [`recv_async`](Self::recv_async) on every
    /// rank would wait without an end: sends and receives run one after the other there, unless they are a batch.
    ///
    /// Two ranks exchange their tensors in the order of their lists.
    ///
    /// # Errors
    /// When there are none, a tensor is not dense and contiguous, the tensors are on several devices, or the other end
    /// is this rank, or not a rank of the group.
    ///
    /// # Syncs
    /// No: it does not wait for the other ranks. Over NCCL, the first collective or batch of a group connects all of
    /// its ranks, so that every rank has to take part in it.
    ///
    /// # Source
    /// `torch.distributed.batch_isend_irecv`
    pub fn batch_isend_irecv(&self, ops: &mut [P2pOp<'_>]) -> Result<Work, DdpError> {
        const OP: &str = "batch_isend_irecv";
        let Some(first) = ops.first() else {
            return Err(DdpError::InvalidOption {
                option: "the number of sends and receives",
                found: "0".to_owned(),
                expected: "at least 1",
            });
        };
        let device = first.tensor().device();
        for op in ops.iter() {
            check::tensor(self, OP, "a tensor", op.tensor())?;
            self.check_other(OP, op.end().0)?;
            if op.tensor().device() != device {
                return Err(DdpError::InvalidTensor {
                    op: OP,
                    argument: "a tensor".to_owned(),
                    found: format!("on {:?}", op.tensor().device()),
                    expected: format!("on {device:?}, as the first one is"),
                });
            }
        }
        if check::carried_by_nccl(self, device) {
            let tensors: Vec<&Tensor> = ops.iter().map(P2pOp::tensor).collect();
            let ends: Vec<(usize, bool)> = ops.iter().map(P2pOp::end).collect();
            let context = self.context(OP);
            let _no_grad = tch::no_grad_guard();
            let work = self.engine().start_batch(&TensorList::new(&tensors)?, &ends);
            let work = work.map_err(|source| DdpError::between(context.clone(), source))?;
            return Ok(Work::new(work, context, |_| Ok(())));
        }
        // Gloo's sends and receives do not wait for each other.
        let mut works = Vec::with_capacity(ops.len());
        for op in ops {
            works.push(match op {
                P2pOp::Send(tensor, to) => self.send_async(tensor, *to, 0)?,
                P2pOp::Recv(tensor, from) => self.recv_async(tensor, Some(*from), 0)?.and_then(|_| Ok(())),
            });
        }
        let last = works.remove(works.len() - 1);
        Ok(last.after(works))
    }
}
