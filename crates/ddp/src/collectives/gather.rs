//! Broadcast, and gathers to all ranks or to one.

use overdrive_ffi::c10d::CollectiveKind;
use tch::Tensor;

use super::{Parts, check};
use crate::error::DdpError;
use crate::group::ProcessGroup;
use crate::work::Work;

impl ProcessGroup {
    /// Overwrites the tensor on every rank with rank `root`'s.
    ///
    /// # Shapes
    /// The same on all ranks.
    ///
    /// # Errors
    /// When the tensor is not dense and contiguous, there is no such root, or a rank has exited or does not take part
    /// within the group's timeout.
    ///
    /// # Syncs
    /// Waits for other ranks.
    ///
    /// # Source
    /// `torch.distributed.broadcast`
    pub fn broadcast(&self, tensor: &mut Tensor, root: usize) -> Result<(), DdpError> {
        self.broadcast_async(tensor, root)?.wait()
    }

    /// Starts [`broadcast`](Self::broadcast); [`Work::wait`](crate::Work::wait) waits for its end.
    ///
    /// # Errors
    /// When the tensor is not dense and contiguous, or there is no such root.
    ///
    /// # Syncs
    /// No: it does not wait for the other ranks, unless the group has [`verify`](crate::ProcessGroupBuilder::verify).
    pub fn broadcast_async(&self, tensor: &mut Tensor, root: usize) -> Result<Work, DdpError> {
        check::tensor(self, "broadcast", "the tensor", tensor)?;
        self.check_rank("the root", root)?;
        let parts = Parts { outputs: std::slice::from_ref(tensor), ..Parts::default() };
        self.start("broadcast", CollectiveKind::Broadcast(root), &parts, |_| Ok(()))
    }

    /// Every rank's tensor, in the order of ranks.
    ///
    /// # Shapes
    /// The same on all ranks.
    ///
    /// # Errors
    /// When the tensor is not dense and contiguous, or a rank has exited or does not take part within the group's
    /// timeout.
    ///
    /// # Syncs
    /// Waits for all ranks.
    ///
    /// # Source
    /// `torch.distributed.all_gather`
    pub fn all_gather(&self, tensor: &Tensor) -> Result<Vec<Tensor>, DdpError> {
        self.all_gather_async(tensor)?.wait()
    }

    /// Starts [`all_gather`](Self::all_gather); [`Work::wait`](crate::Work::wait) waits for its end.
    ///
    /// # Errors
    /// When the tensor is not dense and contiguous.
    ///
    /// # Syncs
    /// No: it does not wait for the other ranks, unless the group has [`verify`](crate::ProcessGroupBuilder::verify).
    pub fn all_gather_async(&self, tensor: &Tensor) -> Result<Work<Vec<Tensor>>, DdpError> {
        check::tensor(self, "all_gather", "the tensor", tensor)?;
        let outputs = empties_like(tensor, self.size())?;
        let parts = Parts { inputs: std::slice::from_ref(tensor), outputs: &outputs, ..Parts::default() };
        let work = self.start("all_gather", CollectiveKind::AllGather, &parts, |_| Ok(()))?;
        Ok(work.and_then(move |()| Ok(outputs)))
    }

    /// Every rank's tensor, concatenated into `output` in the order of ranks.
    ///
    /// # Shapes
    /// `output`: as many elements as `input`, times the number of ranks; `input` has the same size on all ranks.
    ///
    /// # Errors
    /// When a tensor is not dense and contiguous, the sizes, dtypes or devices do not match, or a rank has exited or
    /// does not take part within the group's timeout.
    ///
    /// # Syncs
    /// Waits for all ranks.
    ///
    /// # Source
    /// `torch.distributed.all_gather_into_tensor`
    #[doc(alias = "all_gather_into_tensor")]
    pub fn all_gather_into(&self, output: &mut Tensor, input: &Tensor) -> Result<(), DdpError> {
        self.all_gather_into_async(output, input)?.wait()
    }

    /// Starts [`all_gather_into`](Self::all_gather_into); [`Work::wait`](crate::Work::wait) waits for its end.
    ///
    /// # Errors
    /// When a tensor is not dense and contiguous, or the sizes, dtypes or devices do not match.
    ///
    /// # Syncs
    /// No: it does not wait for the other ranks, unless the group has [`verify`](crate::ProcessGroupBuilder::verify).
    pub fn all_gather_into_async(&self, output: &mut Tensor, input: &Tensor) -> Result<Work, DdpError> {
        check::whole(self, "all_gather_into", ("output", output), ("input", input))?;
        let parts =
            Parts { inputs: std::slice::from_ref(input), outputs: std::slice::from_ref(output), ..Parts::default() };
        self.start("all_gather_into", CollectiveKind::AllGatherInto, &parts, |_| Ok(()))
    }

    /// Every rank's tensor, in the order of ranks, on `root`; `None` on the others.
    ///
    /// # Shapes
    /// The same on all ranks.
    ///
    /// # Errors
    /// When the tensor is not dense and contiguous, there is no such root, or a rank has exited or does not take part
    /// within the group's timeout.
    ///
    /// # Syncs
    /// Waits for other ranks.
    ///
    /// # Source
    /// `torch.distributed.gather`
    pub fn gather(&self, tensor: &Tensor, root: usize) -> Result<Option<Vec<Tensor>>, DdpError> {
        self.gather_async(tensor, root)?.wait()
    }

    /// Starts [`gather`](Self::gather); [`Work::wait`](crate::Work::wait) waits for its end.
    ///
    /// # Errors
    /// When the tensor is not dense and contiguous, or there is no such root.
    ///
    /// # Syncs
    /// No: it does not wait for the other ranks, unless the group has [`verify`](crate::ProcessGroupBuilder::verify).
    pub fn gather_async(&self, tensor: &Tensor, root: usize) -> Result<Work<Option<Vec<Tensor>>>, DdpError> {
        check::tensor(self, "gather", "the tensor", tensor)?;
        self.check_rank("the root", root)?;
        let is_root = self.rank() == root;
        let outputs = empties_like(tensor, if is_root { self.size() } else { 0 })?;
        let parts = Parts { inputs: std::slice::from_ref(tensor), outputs: &outputs, ..Parts::default() };
        let work = self.start("gather", CollectiveKind::Gather(root), &parts, |_| Ok(()))?;
        Ok(work.and_then(move |()| Ok(is_root.then_some(outputs))))
    }
}

/// `count` uninitialised tensors of the same shape, dtype and device.
pub(super) fn empties_like(tensor: &Tensor, count: usize) -> Result<Vec<Tensor>, DdpError> {
    let _no_grad = tch::no_grad_guard();
    Ok((0..count).map(|_| tensor.f_empty_like()).collect::<Result<_, _>>()?)
}
