//! Communication hooks: ways to average gradients over ranks other than an all-reduce.

mod compress;
mod driver;
mod one_bit;
mod post_local_sgd;
mod power_sgd;
pub(crate) mod signs;
mod top_k;
mod warm_up;

use overdrive_ffi::c10d::BucketHook;
use tch::Tensor;

use crate::error::DdpError;
use crate::work::Work;

pub use compress::CastCompress;
pub use one_bit::{OneBit, OneBitInFlight};
pub use overdrive_ffi::c10d::GradBucket;
pub use post_local_sgd::PostLocalSgd;
pub use power_sgd::{Factors, PowerSgd, PowerSgdInFlight, PowerSgdOptions};
pub use top_k::{TopK, TopKInFlight};

/// Averages a bucket's gradients over ranks.
///
/// The reducer calls [`start`](Self::start) as soon as a bucket's gradients are there, and [`finish`](Self::finish) at
/// the end of backward, for all buckets in order. So the communication that `start` begins overlaps with backward. All
/// ranks see the same buckets in the same order, so a hook may run any collectives.
///
/// A closure from a bucket to the [`Work`] of its mean is a hook too.
///
/// # Source
/// `register_comm_hook(state, hook)`
pub trait CommHook: Send {
    /// What `start` hands to `finish`, such as a [`Work`].
    type InFlight: Send;

    /// Starts a bucket's communication.
    ///
    /// # Errors
    /// Any; backward then fails with [`DdpError::Hook`], and the model has to be wrapped anew.
    fn start(&mut self, bucket: &GradBucket) -> Result<Self::InFlight, DdpError>;

    /// The bucket's mean over ranks.
    ///
    /// # Shapes
    /// As the bucket's `buffer`, contiguous, of its dtype and on its device.
    ///
    /// # Errors
    /// Any; backward then fails with [`DdpError::Hook`], and the model has to be wrapped anew.
    fn finish(&mut self, bucket: &GradBucket, in_flight: Self::InFlight) -> Result<Tensor, DdpError>;
}

impl<F> CommHook for F
where
    F: FnMut(&GradBucket) -> Result<Work<Tensor>, DdpError> + Send,
{
    type InFlight = Work<Tensor>;

    fn start(&mut self, bucket: &GradBucket) -> Result<Work<Tensor>, DdpError> {
        self(bucket)
    }

    fn finish(&mut self, _bucket: &GradBucket, in_flight: Work<Tensor>) -> Result<Tensor, DdpError> {
        in_flight.wait()
    }
}

pub(crate) fn driven(hook: impl CommHook + 'static) -> Box<dyn BucketHook> {
    Box::new(driver::Driver::new(hook))
}
