//! A group as what other crates decide by together.

use overdrive_core::{RankGroup, SyncError};
use overdrive_ffi::c10d::ReduceOp;
use tch::Tensor;

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
        self.all_reduce(&mut largest, ReduceOp::Max)?;
        Ok(largest.f_int64_value(&[0]).map_err(DdpError::from)?)
    }
}
