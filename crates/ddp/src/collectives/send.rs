//! Point-to-point: from one rank to another.

use overdrive_ffi::c10d::CollectiveKind;
use tch::Tensor;

use super::{Parts, check};
use crate::error::DdpError;
use crate::group::ProcessGroup;
use crate::work::Work;

impl ProcessGroup {
    /// Sends a tensor to a rank. `tag` distinguishes sends between the same two ranks.
    ///
    /// # Errors
    /// When the tensor is not dense and contiguous, `to` is this rank, or not a rank of the group, or that rank has
    /// exited or does not take part within the group's timeout.
    ///
    /// # Syncs
    /// Waits until the other rank receives.
    ///
    /// # Source
    /// `torch.distributed.send`
    pub fn send(&self, tensor: &Tensor, to: usize, tag: i32) -> Result<(), DdpError> {
        self.send_async(tensor, to, tag)?.wait()
    }

    /// Starts [`send`](Self::send); [`Work::wait`](crate::Work::wait) waits for its end.
    ///
    /// # Errors
    /// When the tensor is not dense and contiguous, or `to` is this rank, or not a rank of the group.
    ///
    /// # Syncs
    /// No: it does not wait for the other rank.
    #[doc(alias = "isend")]
    pub fn send_async(&self, tensor: &Tensor, to: usize, tag: i32) -> Result<Work, DdpError> {
        check::tensor(self, "send", "the tensor", tensor)?;
        self.check_other("send", to)?;
        let parts = Parts { inputs: std::slice::from_ref(tensor), tag, ..Parts::default() };
        self.start("send", CollectiveKind::Send(to), &parts, |_| Ok(()))
    }

    /// Overwrites a tensor with one that rank `from` sends, or the first rank to send for `None`. Returns the sender.
    ///
    /// # Shapes
    /// As many elements as were sent.
    ///
    /// # Errors
    /// When the tensor is not dense and contiguous, `from` is this rank, or not a rank of the group, or the sender has
    /// exited or does not take part within the group's timeout.
    ///
    /// # Syncs
    /// Waits until the other rank sends.
    ///
    /// # Source
    /// `torch.distributed.recv`
    pub fn recv(&self, tensor: &mut Tensor, from: Option<usize>, tag: i32) -> Result<usize, DdpError> {
        self.recv_async(tensor, from, tag)?.wait()
    }

    /// Starts [`recv`](Self::recv); [`Work::wait`](crate::Work::wait) waits for its end.
    ///
    /// # Errors
    /// When the tensor is not dense and contiguous, `from` is this rank, or not a rank of the group, or NCCL is to
    /// receive from any rank.
    ///
    /// # Syncs
    /// No: it does not wait for the other rank.
    #[doc(alias = "irecv")]
    pub fn recv_async(&self, tensor: &mut Tensor, from: Option<usize>, tag: i32) -> Result<Work<usize>, DdpError> {
        check::tensor(self, "recv", "the tensor", tensor)?;
        let parts = Parts { outputs: std::slice::from_ref(tensor), tag, ..Parts::default() };
        if let Some(from) = from {
            self.check_other("recv", from)?;
            return self.start("recv", CollectiveKind::Recv(from), &parts, move |_| Ok(from));
        }
        if check::carried_by_nccl(self, tensor.device()) {
            let reason = "NCCL cannot receive from any rank: give the rank that sends".to_owned();
            return Err(DdpError::Unsupported { op: "recv", reason });
        }
        self.start("recv", CollectiveKind::RecvAny, &parts, |work| Ok(work.source_rank()?))
    }

    pub(super) fn check_other(&self, op: &'static str, other: usize) -> Result<(), DdpError> {
        self.check_rank("the other rank", other)?;
        if other != self.rank() {
            return Ok(());
        }
        Err(DdpError::Unsupported { op, reason: format!("rank {other} cannot exchange a tensor with itself") })
    }
}
