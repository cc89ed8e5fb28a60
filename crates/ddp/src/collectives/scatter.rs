//! Reduce-scatter and scatter: each rank gets its part.

use overdrive_ffi::c10d::{CollectiveKind, ReduceOp};
use tch::Tensor;

use super::{Parts, check};
use crate::error::DdpError;
use crate::group::ProcessGroup;
use crate::work::Work;

impl ProcessGroup {
    /// Reduces each tensor of the list over all ranks. Rank i gets the i-th result.
    ///
    /// # Shapes
    /// One tensor per rank, all of the same shape, the same on all ranks.
    ///
    /// # Errors
    /// When a tensor is not dense and contiguous, there is not one per rank, the backend has no such reduction of
    /// their dtype, or a rank has exited or does not take part within the group's timeout.
    ///
    /// # Syncs
    /// Waits for all ranks.
    ///
    /// # Source
    /// `torch.distributed.reduce_scatter`
    pub fn reduce_scatter(&self, inputs: &[Tensor], op: ReduceOp) -> Result<Tensor, DdpError> {
        self.reduce_scatter_async(inputs, op)?.wait()
    }

    /// Starts [`reduce_scatter`](Self::reduce_scatter); [`Work::wait`](crate::Work::wait) waits for its end.
    ///
    /// # Errors
    /// When a tensor is not dense and contiguous, there is not one per rank, or the backend has no such reduction of
    /// their dtype.
    ///
    /// # Syncs
    /// No: it does not wait for the other ranks, unless the group has [`verify`](crate::ProcessGroupBuilder::verify).
    pub fn reduce_scatter_async(&self, inputs: &[Tensor], op: ReduceOp) -> Result<Work<Tensor>, DdpError> {
        const OP: &str = "reduce_scatter";
        check::one_per_rank(self, OP, "inputs", inputs)?;
        check::list(self, OP, "inputs", inputs, ("the first", &inputs[0]), check::Shapes::Same)?;
        let (carried, mut mean) = self.carried(OP, op, &inputs[0])?;
        let mut outputs = super::gather::empties_like(&inputs[0], 1)?;
        let output = outputs[0].shallow_clone();
        let parts = Parts { inputs, outputs: std::slice::from_ref(&output), ..Parts::default() };
        self.start(OP, CollectiveKind::ReduceScatter(carried), &parts, move |_| {
            mean.apply(&mut outputs)?;
            Ok(outputs.swap_remove(0))
        })
    }

    /// Reduces a tensor over all ranks and gives each rank its part, in the order of ranks.
    ///
    /// # Shapes
    /// `input`: as many elements as `output`, times the number of ranks.
    ///
    /// # Errors
    /// When a tensor is not dense and contiguous, the sizes, dtypes or devices do not match, the backend has no such
    /// reduction of their dtype, or a rank has exited or does not take part within the group's timeout.
    ///
    /// # Syncs
    /// Waits for all ranks.
    ///
    /// # Source
    /// `torch.distributed.reduce_scatter_tensor`
    #[doc(alias = "reduce_scatter_tensor")]
    pub fn reduce_scatter_into(&self, output: &mut Tensor, input: &Tensor, op: ReduceOp) -> Result<(), DdpError> {
        self.reduce_scatter_into_async(output, input, op)?.wait()
    }

    /// Starts [`reduce_scatter_into`](Self::reduce_scatter_into); [`Work::wait`](crate::Work::wait) waits for its end.
    ///
    /// # Errors
    /// When a tensor is not dense and contiguous, the sizes, dtypes or devices do not match, or the backend has no such
    /// reduction of their dtype.
    ///
    /// # Syncs
    /// No: it does not wait for the other ranks, unless the group has [`verify`](crate::ProcessGroupBuilder::verify).
    pub fn reduce_scatter_into_async(
        &self,
        output: &mut Tensor,
        input: &Tensor,
        op: ReduceOp,
    ) -> Result<Work, DdpError> {
        const OP: &str = "reduce_scatter_into";
        check::whole(self, OP, ("input", input), ("output", output))?;
        let (carried, mut mean) = self.carried(OP, op, output)?;
        let mut outputs = [output.shallow_clone()];
        let parts =
            Parts { inputs: std::slice::from_ref(input), outputs: std::slice::from_ref(output), ..Parts::default() };
        self.start(OP, CollectiveKind::ReduceScatterInto(carried), &parts, move |_| mean.apply(&mut outputs))
    }

    /// Overwrites each rank's `output` with the tensor that `root` has for it.
    ///
    /// # Shapes
    /// On `root`, `inputs` has one tensor per rank, each like `output`; elsewhere it is empty.
    ///
    /// # Errors
    /// When a tensor is not dense and contiguous, shapes, dtypes or devices do not match, there is no such root, or a
    /// rank has exited or does not take part within the group's timeout.
    ///
    /// # Syncs
    /// Waits for other ranks.
    ///
    /// # Source
    /// `torch.distributed.scatter`
    pub fn scatter(&self, output: &mut Tensor, inputs: &[Tensor], root: usize) -> Result<(), DdpError> {
        self.scatter_async(output, inputs, root)?.wait()
    }

    /// Starts [`scatter`](Self::scatter); [`Work::wait`](crate::Work::wait) waits for its end.
    ///
    /// # Errors
    /// When a tensor is not dense and contiguous, shapes, dtypes or devices do not match, or there is no such root.
    ///
    /// # Syncs
    /// No: it does not wait for the other ranks, unless the group has [`verify`](crate::ProcessGroupBuilder::verify).
    pub fn scatter_async(&self, output: &mut Tensor, inputs: &[Tensor], root: usize) -> Result<Work, DdpError> {
        const OP: &str = "scatter";
        check::tensor(self, OP, "output", output)?;
        self.check_rank("the root", root)?;
        if self.rank() == root {
            check::one_per_rank(self, OP, "inputs", inputs)?;
        } else if !inputs.is_empty() {
            return Err(DdpError::InvalidTensor {
                op: OP,
                argument: "inputs".to_owned(),
                found: format!("a list of {}", inputs.len()),
                expected: format!("empty on every rank but the root, {root}"),
            });
        }
        check::list(self, OP, "inputs", inputs, ("output", output), check::Shapes::Same)?;
        let parts = Parts { inputs, outputs: std::slice::from_ref(output), ..Parts::default() };
        self.start(OP, CollectiveKind::Scatter(root), &parts, |_| Ok(()))
    }
}
