//! Reductions whose whole result goes to all ranks, or to one.

use overdrive_ffi::c10d::{CollectiveKind, ReduceOp};
use overdrive_ffi::{Arg, LazyOp};
use tch::Tensor;

use super::{Parts, check};
use crate::error::DdpError;
use crate::group::ProcessGroup;
use crate::work::Work;

static DIV: LazyOp = LazyOp::new("aten::div_", "Scalar");

impl ProcessGroup {
    /// Reduces a tensor over all ranks, in place.
    ///
    /// # Shapes
    /// The same on all ranks.
    ///
    /// # Errors
    /// When the tensor is not dense and contiguous, the backend has no such reduction of its dtype, or a rank has
    /// exited or does not take part within the group's timeout.
    ///
    /// # Syncs
    /// Waits for all ranks.
    ///
    /// # Source
    /// `torch.distributed.all_reduce`
    pub fn all_reduce(&self, tensor: &mut Tensor, op: ReduceOp) -> Result<(), DdpError> {
        self.all_reduce_async(tensor, op)?.wait()
    }

    /// Starts [`all_reduce`](Self::all_reduce); [`Work::wait`](crate::Work::wait) waits for its end.
    ///
    /// # Errors
    /// When the tensor is not dense and contiguous, or the backend has no such reduction of its dtype.
    ///
    /// # Syncs
    /// No: it does not wait for the other ranks, unless the group has [`verify`](crate::ProcessGroupBuilder::verify).
    pub fn all_reduce_async(&self, tensor: &mut Tensor, op: ReduceOp) -> Result<Work, DdpError> {
        check::tensor(self, "all_reduce", "the tensor", tensor)?;
        self.reduce_all("all_reduce", std::slice::from_ref(tensor), op, CollectiveKind::AllReduce)
    }

    /// Reduces several tensors of one dtype over all ranks, in place and in one collective.
    ///
    /// # Shapes
    /// The same on all ranks.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and when the dtypes or devices differ.
    ///
    /// # Syncs
    /// Waits for all ranks.
    ///
    /// # Source
    /// `torch.distributed.all_reduce_coalesced`
    pub fn all_reduce_coalesced(&self, tensors: &mut [Tensor], op: ReduceOp) -> Result<(), DdpError> {
        self.all_reduce_coalesced_async(tensors, op)?.wait()
    }

    /// Starts [`all_reduce_coalesced`](Self::all_reduce_coalesced); [`Work::wait`](crate::Work::wait) waits for its end.
    ///
    /// # Errors
    /// As [`all_reduce_async`](Self::all_reduce_async), and when the dtypes or devices differ.
    ///
    /// # Syncs
    /// No: it does not wait for the other ranks, unless the group has [`verify`](crate::ProcessGroupBuilder::verify).
    pub fn all_reduce_coalesced_async(&self, tensors: &mut [Tensor], op: ReduceOp) -> Result<Work, DdpError> {
        const OP: &str = "all_reduce_coalesced";
        let first = check::first(OP, "the list", tensors)?;
        check::list(self, OP, "tensors", tensors, ("the first", first), check::Shapes::Any)?;
        self.reduce_all(OP, tensors, op, CollectiveKind::AllReduceCoalesced)
    }

    /// Reduces a tensor over all ranks, in place, for `root` only; on the other ranks the contents are undefined
    /// afterwards.
    ///
    /// # Shapes
    /// The same on all ranks.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and when there is no such root.
    ///
    /// # Syncs
    /// Waits for other ranks.
    ///
    /// # Source
    /// `torch.distributed.reduce`
    pub fn reduce(&self, tensor: &mut Tensor, root: usize, op: ReduceOp) -> Result<(), DdpError> {
        self.reduce_async(tensor, root, op)?.wait()
    }

    /// Starts [`reduce`](Self::reduce); [`Work::wait`](crate::Work::wait) waits for its end.
    ///
    /// # Errors
    /// As [`all_reduce_async`](Self::all_reduce_async), and when there is no such root.
    ///
    /// # Syncs
    /// No: it does not wait for the other ranks, unless the group has [`verify`](crate::ProcessGroupBuilder::verify).
    pub fn reduce_async(&self, tensor: &mut Tensor, root: usize, op: ReduceOp) -> Result<Work, DdpError> {
        check::tensor(self, "reduce", "the tensor", tensor)?;
        self.check_rank("the root", root)?;
        self.reduce_all("reduce", std::slice::from_ref(tensor), op, |op| CollectiveKind::Reduce(op, root))
    }

    fn reduce_all(
        &self,
        name: &'static str,
        tensors: &[Tensor],
        op: ReduceOp,
        kind: impl FnOnce(ReduceOp) -> CollectiveKind,
    ) -> Result<Work, DdpError> {
        let (carried, mut mean) = self.carried(name, op, &tensors[0])?;
        let mut outputs: Vec<Tensor> = tensors.iter().map(Tensor::shallow_clone).collect();
        let parts = Parts { outputs: tensors, ..Parts::default() };
        self.start(name, kind(carried), &parts, move |_| mean.apply(&mut outputs))
    }

    /// The reduction that the backend runs for `op`, and the division by the number of ranks that is left to do (for
    /// `Avg` over Gloo).
    pub(super) fn carried(
        &self,
        name: &'static str,
        op: ReduceOp,
        tensor: &Tensor,
    ) -> Result<(ReduceOp, Mean), DdpError> {
        check::reduce_op(self, name, op, tensor.kind(), tensor.device())?;
        // Gloo has no mean.
        let divides = op == ReduceOp::Avg && !check::carried_by_nccl(self, tensor.device());
        let carried = if divides { ReduceOp::Sum } else { op };
        Ok((carried, Mean(divides.then(|| self.size()))))
    }
}

/// Divides sums by the number of ranks, where the backend does not.
#[derive(Default)]
pub(super) struct Mean(Option<usize>);

impl Mean {
    pub(super) fn apply(&mut self, sums: &mut [Tensor]) -> Result<(), DdpError> {
        let Some(ranks) = self.0 else { return Ok(()) };
        let _no_grad = tch::no_grad_guard();
        for sum in sums {
            DIV.call(&[Arg::Tensor(sum), Arg::Double(ranks as f64)])?;
        }
        Ok(())
    }
}
