//! The exchange of mixed precision: a bucket's gradients are added up in a dtype of their own.

use overdrive_ffi::c10d::{GradBucket, ReduceOp};
use overdrive_ffi::{Arg, LazyOp};
use tch::{Kind, Tensor};

use super::CommHook;
use crate::error::DdpError;
use crate::group::ProcessGroup;
use crate::work::Work;

static DIV: LazyOp = LazyOp::new("aten::div_", "Scalar");

/// # Source
/// `mixed_precision_hooks._reducer_allreduce_and_upcast_hook`, which rounds the gradients of earlier passes to the
/// buckets' dtype
pub(crate) struct InLowPrecision {
    pub(crate) group: ProcessGroup,
    /// The dtype of the sums; the buckets' if there is none.
    pub(crate) reduce: Option<Kind>,
}

impl CommHook for InLowPrecision {
    type InFlight = (Tensor, Work);

    fn start(&mut self, bucket: &GradBucket) -> Result<(Tensor, Work), DdpError> {
        let mut sent = bucket.buffer.f_to_kind(self.reduce.unwrap_or(bucket.buffer.kind()))?;
        let mut begin = 0;
        for (earlier, gradient) in bucket.earlier.iter().zip(&bucket.gradients) {
            if earlier.defined() {
                // Gradients lie in a bucket as their parameters in memory.
                let _sum = sent.f_as_strided(gradient.size(), gradient.stride(), begin)?.f_add_(earlier)?;
            }
            begin += i64::try_from(gradient.numel()).unwrap_or(i64::MAX);
        }
        let work = self.group.all_reduce_async(&mut sent, ReduceOp::Sum)?;
        Ok((sent, work))
    }

    fn finish(&mut self, _bucket: &GradBucket, (sent, work): (Tensor, Work)) -> Result<Tensor, DdpError> {
        work.wait()?;
        DIV.call(&[Arg::Tensor(&sent), Arg::Double(self.group.size() as f64)])?;
        Ok(sent)
    }

    fn kind_of_mean(&self) -> Option<Kind> {
        self.reduce
    }
}
