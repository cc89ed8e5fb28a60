//! Collectives on several tensors of one dtype: they are packed into one tensor, sent together, and unpacked in `wait`.
//!
//! libtorch's own coalesced collectives do not exist for groups that compare collectives over ranks
//! ([`verify`](crate::ProcessGroupBuilder::verify)), and with Gloo they reduce one tensor after the other.

use overdrive_ffi::c10d::{CollectiveKind, ReduceOp};
use tch::Tensor;

use super::reduce::Mean;
use super::{Parts, check};
use crate::error::DdpError;
use crate::group::ProcessGroup;
use crate::work::Work;

impl ProcessGroup {
    /// Every rank's list of tensors, in the order of ranks.
    ///
    /// # Shapes
    /// The same on all ranks.
    ///
    /// # Errors
    /// When the list is empty, a tensor is not dense and contiguous, dtypes or devices differ, or a rank has exited or
    /// does not take part within the group's timeout.
    ///
    /// # Syncs
    /// Waits for all ranks.
    ///
    /// # Source
    /// `torch.distributed.all_gather_coalesced`
    pub fn all_gather_coalesced(&self, tensors: &[Tensor]) -> Result<Vec<Vec<Tensor>>, DdpError> {
        self.all_gather_coalesced_async(tensors)?.wait()
    }

    /// Starts [`all_gather_coalesced`](Self::all_gather_coalesced); [`Work::wait`](crate::Work::wait) waits for its
    /// end.
    ///
    /// # Errors
    /// When the list is empty, a tensor is not dense and contiguous, or dtypes or devices differ.
    ///
    /// # Syncs
    /// No: it does not wait for the other ranks, unless the group has [`verify`](crate::ProcessGroupBuilder::verify).
    pub fn all_gather_coalesced_async(&self, tensors: &[Tensor]) -> Result<Work<Vec<Vec<Tensor>>>, DdpError> {
        const OP: &str = "all_gather_coalesced";
        let first = check::first(OP, "the list", tensors)?;
        check::list(self, OP, "tensors", tensors, ("the first", first), check::Shapes::Any)?;
        let wholes = tensors.iter().map(|tensor| whole_of(tensor, self.size())).collect::<Result<Vec<_>, _>>()?;
        let (outputs, inputs) = ((&wholes[..], self.size()), (tensors, 1));
        let work = self.start_several(OP, CollectiveKind::AllGatherInto, outputs, inputs, Mean::default())?;
        Ok(work.and_then(move |()| {
            let by_tensor = wholes.iter().map(parts_of).collect::<Result<Vec<_>, _>>()?;
            let ranks = by_tensor[0].len();
            Ok((0..ranks).map(|rank| by_tensor.iter().map(|parts| parts[rank].shallow_clone()).collect()).collect())
        }))
    }

    /// [`all_gather_into`](Self::all_gather_into) for several tensors of one dtype in one collective.
    ///
    /// # Shapes
    /// Each of `outputs`: as many elements as its input, times the number of ranks; an input has the same size on all
    /// ranks.
    ///
    /// # Errors
    /// As [`all_gather_into`](Self::all_gather_into), and when a list is empty, the lists differ in length, or dtypes
    /// or devices differ.
    ///
    /// # Syncs
    /// Waits for all ranks.
    ///
    /// # Source
    /// `c10d::ProcessGroup::allgather_into_tensor_coalesced`
    #[doc(alias = "allgather_into_tensor_coalesced")]
    pub fn all_gather_into_coalesced(&self, outputs: &mut [Tensor], inputs: &[Tensor]) -> Result<(), DdpError> {
        self.all_gather_into_coalesced_async(outputs, inputs)?.wait()
    }

    /// Starts [`all_gather_into_coalesced`](Self::all_gather_into_coalesced); [`Work::wait`](crate::Work::wait) waits
    /// for its end.
    ///
    /// # Errors
    /// As [`all_gather_into_async`](Self::all_gather_into_async), and when a list is empty, the lists differ in length,
    /// or dtypes or devices differ.
    ///
    /// # Syncs
    /// No: it does not wait for the other ranks, unless the group has [`verify`](crate::ProcessGroupBuilder::verify).
    pub fn all_gather_into_coalesced_async(&self, outputs: &mut [Tensor], inputs: &[Tensor]) -> Result<Work, DdpError> {
        const OP: &str = "all_gather_into_coalesced";
        check::wholes(self, OP, ("outputs", outputs), ("inputs", inputs))?;
        let (outputs, inputs) = ((&outputs[..], self.size()), (inputs, 1));
        self.start_several(OP, CollectiveKind::AllGatherInto, outputs, inputs, Mean::default())
    }

    /// [`reduce_scatter_into`](Self::reduce_scatter_into) for several tensors of one dtype in one collective.
    ///
    /// # Shapes
    /// Each of `inputs`: as many elements as its output, times the number of ranks.
    ///
    /// # Errors
    /// As [`reduce_scatter_into`](Self::reduce_scatter_into), and when a list is empty, the lists differ in length, or
    /// dtypes or devices differ.
    ///
    /// # Syncs
    /// Waits for all ranks.
    ///
    /// # Source
    /// `c10d::ProcessGroup::reduce_scatter_tensor_coalesced`
    #[doc(alias = "reduce_scatter_tensor_coalesced")]
    pub fn reduce_scatter_into_coalesced(
        &self,
        outputs: &mut [Tensor],
        inputs: &[Tensor],
        op: ReduceOp,
    ) -> Result<(), DdpError> {
        self.reduce_scatter_into_coalesced_async(outputs, inputs, op)?.wait()
    }

    /// Starts [`reduce_scatter_into_coalesced`](Self::reduce_scatter_into_coalesced); [`Work::wait`](crate::Work::wait)
    /// waits for its end.
    ///
    /// # Errors
    /// As [`reduce_scatter_into_async`](Self::reduce_scatter_into_async), and when a list is empty, the lists differ in
    /// length, or dtypes or devices differ.
    ///
    /// # Syncs
    /// No: it does not wait for the other ranks, unless the group has [`verify`](crate::ProcessGroupBuilder::verify).
    pub fn reduce_scatter_into_coalesced_async(
        &self,
        outputs: &mut [Tensor],
        inputs: &[Tensor],
        op: ReduceOp,
    ) -> Result<Work, DdpError> {
        const OP: &str = "reduce_scatter_into_coalesced";
        check::wholes(self, OP, ("inputs", inputs), ("outputs", outputs))?;
        let (carried, mean) = self.carried(OP, op, &inputs[0])?;
        let (outputs, inputs) = ((&outputs[..], 1), (inputs, self.size()));
        self.start_several(OP, CollectiveKind::ReduceScatterInto(carried), outputs, inputs, mean)
    }

    /// Runs one collective for all tensors. The caller has checked the lists. The number beside each list says how many
    /// ranks' parts each of its tensors has.
    fn start_several(
        &self,
        op: &'static str,
        kind: CollectiveKind,
        (outputs, output_ranks): (&[Tensor], usize),
        (inputs, input_ranks): (&[Tensor], usize),
        mut mean: Mean,
    ) -> Result<Work, DdpError> {
        let _no_grad = tch::no_grad_guard();
        let (mut targets, sources) = (by_rank(outputs, output_ranks)?, by_rank(inputs, input_ranks)?);
        if self.verifies() {
            let work = self.start_one_by_one(op, kind, &targets, &sources)?;
            return Ok(work.and_then(move |()| mean.apply(&mut targets)));
        }
        let packed = Tensor::f_cat(&sources, 1)?;
        let columns: Vec<i64> = targets.iter().map(|target| target.size()[1]).collect();
        let shape = [output_ranks as i64, columns.iter().sum()];
        let mut result = [packed.f_new_empty(shape, (packed.kind(), packed.device()))?];
        let parts = Parts { inputs: std::slice::from_ref(&packed), outputs: &result, ..Parts::default() };
        let work = self.start(op, kind, &parts, |_| Ok(()))?;
        Ok(work.and_then(move |()| {
            let _no_grad = tch::no_grad_guard();
            mean.apply(&mut result)?;
            for (target, part) in targets.iter_mut().zip(result[0].f_split_with_sizes(&columns, 1)?) {
                target.f_copy_(&part)?;
            }
            Ok(())
        }))
    }

    /// For groups that compare each collective over ranks: one collective for each tensor, so that tensors that differ
    /// are reported even if the packed lengths are equal. Only the last collective is still under way on return.
    fn start_one_by_one(
        &self,
        op: &'static str,
        kind: CollectiveKind,
        outputs: &[Tensor],
        inputs: &[Tensor],
    ) -> Result<Work, DdpError> {
        let start = |index: usize| {
            let one = index..index + 1;
            let parts = Parts { inputs: &inputs[one.clone()], outputs: &outputs[one], ..Parts::default() };
            self.start(op, kind, &parts, |_| Ok(()))
        };
        let mut work = start(0)?;
        for index in 1..inputs.len() {
            work.wait()?;
            work = start(index)?;
        }
        Ok(work)
    }
}

/// Memory for the tensors of all ranks, one after the other.
fn whole_of(tensor: &Tensor, ranks: usize) -> Result<Tensor, DdpError> {
    let mut shape = tensor.size();
    shape.insert(0, ranks as i64);
    Ok(tensor.f_new_empty(&shape[..], (tensor.kind(), tensor.device()))?)
}

/// Each rank's part of a tensor, copied: autograd forbids some in-place operations on the views that `unbind` returns.
fn parts_of(whole: &Tensor) -> Result<Vec<Tensor>, DdpError> {
    let own = |part: &Tensor| {
        let mut own = part.f_empty_like()?;
        own.f_copy_(part)?;
        Ok(own)
    };
    whole.f_unbind(0)?.iter().map(own).collect()
}

/// Views with a row for each rank's part.
fn by_rank(tensors: &[Tensor], ranks: usize) -> Result<Vec<Tensor>, DdpError> {
    let view = |tensor: &Tensor| Ok(tensor.f_view([ranks as i64, (tensor.numel() / ranks) as i64])?);
    tensors.iter().map(view).collect()
}
