//! The plain mean that lossy hooks start with, and the step counter.

use overdrive_ffi::c10d::{GradBucket, ReduceOp};
use tch::Tensor;

use crate::error::DdpError;
use crate::group::ProcessGroup;
use crate::work::Work;

/// Starts the plain mean of a bucket.
pub(super) fn mean(group: &ProcessGroup, bucket: &GradBucket) -> Result<Work<Tensor>, DdpError> {
    let mut sum = bucket.buffer.shallow_clone();
    let work = group.all_reduce_async(&mut sum, ReduceOp::Avg)?;
    Ok(work.and_then(move |()| Ok(sum)))
}

/// How many backward passes are complete.
#[derive(Debug, Default)]
pub(super) struct Steps(u64);

impl Steps {
    pub(super) fn after(steps: u64) -> Self {
        Self(steps)
    }

    pub(super) fn done(&self) -> u64 {
        self.0
    }

    /// Call it for each finished bucket.
    pub(super) fn count(&mut self, bucket: &GradBucket) {
        if bucket.is_last {
            self.0 += 1;
        }
    }
}
