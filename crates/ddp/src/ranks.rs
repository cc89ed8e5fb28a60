//! `RankGroup` and `GradientSync` for a process group.

use overdrive_core::{AveragedBy, GradientSync, RankGroup, SyncError};
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
        let mut largest = Tensor::f_from_slice(&[value])
            .and_then(|tensor| tensor.f_to_device(self.device()))
            .map_err(DdpError::from)?;
        self.on_host(self.all_reduce_async(&mut largest, ReduceOp::Max)?)?;
        Ok(largest.f_int64_value(&[0]).map_err(DdpError::from)?)
    }
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

    fn sum(&self, value: f64) -> Result<f64, SyncError> {
        let mut total = Tensor::f_from_slice(&[value])
            .and_then(|tensor| tensor.f_to_device(self.device())?.f_to_kind(Kind::Double))
            .map_err(DdpError::from)?;
        self.all_reduce(&mut total, ReduceOp::Sum)?;
        Ok(total.f_double_value(&[0]).map_err(DdpError::from)?)
    }
}
