//! `RankGroup` and `GradientSync` for a process group.

use overdrive_core::{AveragedBy, GradientSync, PendingSum, RankGroup, SyncError};
use overdrive_ffi::c10d::ReduceOp;
use tch::{Kind, Tensor};

use crate::error::DdpError;
use crate::group::ProcessGroup;

impl RankGroup for ProcessGroup {
    fn rank(&self) -> usize {
        Self::rank(self)
    }

    fn world_size(&self) -> usize {
        self.size()
    }

    fn max(&self, value: i64) -> Result<i64, SyncError> {
        Ok(reduced(self, value, ReduceOp::Max)?)
    }

    fn sum(&self, value: i64) -> Result<i64, SyncError> {
        Ok(reduced(self, value, ReduceOp::Sum)?)
    }
}

fn reduced(group: &ProcessGroup, value: i64, op: ReduceOp) -> Result<i64, DdpError> {
    let mut number = Tensor::f_full([1], value, (Kind::Int64, group.device()))?;
    group.on_host(group.all_reduce_async(&mut number, op)?)?;
    Ok(number.f_int64_value(&[0])?)
}

/// Lets an accumulator work with an optimizer that averages over this group in its step
/// ([`OneBitAdam`](crate::OneBitAdam)): only counts are summed here.
impl GradientSync for ProcessGroup {
    fn world_size(&self) -> usize {
        self.size()
    }

    fn averaged_by(&self) -> AveragedBy {
        AveragedBy::Optimizer
    }

    fn hold_back(&self, _hold: bool) -> Result<(), SyncError> {
        Ok(())
    }

    fn close_with_nothing(&self) -> Result<(), SyncError> {
        Ok(())
    }

    /// The ranks' hosts wait for one another, not for the device: over NCCL the number goes through a group over Gloo,
    /// which the first sum makes.
    fn sum(&self, value: f64) -> Result<f64, SyncError> {
        self.start_sum(value)?()
    }

    fn start_sum(&self, value: f64) -> Result<PendingSum, SyncError> {
        let mut total = Tensor::f_from_slice(&[value]).map_err(DdpError::from)?;
        let work = self.of_the_host()?.all_reduce_async(&mut total, ReduceOp::Sum)?;
        Ok(Box::new(move || {
            work.wait()?;
            Ok(total.f_double_value(&[0]).map_err(DdpError::from)?)
        }))
    }
}
