//! Gradients sent as float16 or bfloat16.

use overdrive_ffi::c10d::{GradBucket, ReduceOp};
use overdrive_ffi::{Arg, LazyOp};
use tch::{Kind, Tensor};

use super::CommHook;
use crate::error::DdpError;
use crate::group::ProcessGroup;
use crate::work::Work;

static DIV: LazyOp = LazyOp::new("aten::div_", "Scalar");

/// Sends gradients as float16 or bfloat16: half the bytes of float32, each gradient rounded.
///
/// # Source
/// `default_hooks.fp16_compress_hook`, `default_hooks.bf16_compress_hook`
#[doc(alias = "fp16_compress_hook")]
#[doc(alias = "bf16_compress_hook")]
#[derive(Debug)]
pub struct CastCompress {
    group: ProcessGroup,
    kind: Kind,
}

impl CastCompress {
    /// As float16: 11 bits of precision, nothing above 65,504.
    pub fn half(group: &ProcessGroup) -> Self {
        Self { group: group.clone(), kind: Kind::Half }
    }

    /// As bfloat16: 8 bits of precision, the range of float32.
    pub fn bfloat16(group: &ProcessGroup) -> Self {
        Self { group: group.clone(), kind: Kind::BFloat16 }
    }
}

impl CommHook for CastCompress {
    type InFlight = (Tensor, Work);

    fn start(&mut self, bucket: &GradBucket) -> Result<(Tensor, Work), DdpError> {
        let mut sent = bucket.buffer.f_to_kind(self.kind)?;
        // Divide first, so that the sum stays in range.
        DIV.call(&[Arg::Tensor(&sent), Arg::Double(self.group.size() as f64)])?;
        let work = self.group.all_reduce_async(&mut sent, ReduceOp::Sum)?;
        Ok((sent, work))
    }

    fn finish(&mut self, bucket: &GradBucket, (sent, work): (Tensor, Work)) -> Result<Tensor, DdpError> {
        work.wait()?;
        let mut mean = bucket.buffer.shallow_clone();
        mean.f_copy_(&sent)?;
        Ok(mean)
    }
}
