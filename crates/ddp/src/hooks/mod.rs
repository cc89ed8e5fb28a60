//! Communication hooks: ways to average gradients over ranks other than an all-reduce.

mod compress;
mod driver;
mod hierarchical;
mod low_precision;
mod one_bit;
mod post_local_sgd;
mod power_sgd;
mod shared_memory;
pub(crate) mod signs;
mod state;
mod top_k;
mod warm_up;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use overdrive_core::{StateDict, StateError};
use overdrive_ffi::c10d::BucketHook;
use tch::{Kind, Tensor};

use crate::error::DdpError;
use crate::work::Work;

pub use compress::CastCompress;
pub use hierarchical::HierarchicalAllReduce;
pub(crate) use low_precision::InLowPrecision;
pub use one_bit::{OneBit, OneBitInFlight};
pub use overdrive_ffi::c10d::GradBucket;
pub use post_local_sgd::PostLocalSgd;
pub use power_sgd::{Factors, PowerSgd, PowerSgdInFlight, PowerSgdOptions};
pub use shared_memory::{SharedMemory, SharedMemoryInFlight};
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

    /// What it carries from pass to pass, such as rounding errors; by default nothing. It is saved and loaded with the
    /// state of [`DistributedDataParallel`](crate::DistributedDataParallel), which has the buckets.
    ///
    /// # Errors
    /// When libtorch fails.
    fn state_dict(&self) -> Result<StateDict, StateError> {
        Ok(StateDict::new())
    }

    /// Loads such a state. Everything is checked before anything changes.
    ///
    /// # Errors
    /// When an entry is missing, unknown, or of another type.
    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        state.refuse_unknown(&[])
    }

    /// Whether what it carries is specific to its rank.
    fn differs_by_rank(&self) -> bool {
        false
    }

    /// The dtype of what [`finish`](Self::finish) returns, where it is not that of the bucket's buffer.
    #[doc(hidden)] // For mixed precision alone: otherwise gradients are of the buffer's dtype.
    fn kind_of_mean(&self) -> Option<Kind> {
        None
    }

    /// Is called when libtorch has divided the parameters into other buckets: what a hook carries for the old ones belongs
    /// to none of the new. It happens once, after the first pass of a process that has not loaded a later division.
    fn buckets_rebuilt(&mut self) {}
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

/// A hook that the reducer runs, and `DistributedDataParallel` saves and loads.
pub(crate) struct Carried(Arc<Mutex<dyn Carries>>);

impl std::fmt::Debug for Carried {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CommHook")
    }
}

impl Carried {
    pub(crate) fn lock(&self) -> MutexGuard<'_, dyn Carries + 'static> {
        lock(&self.0)
    }
}

/// A hook's state.
pub(crate) trait Carries: Send {
    fn state(&self) -> Result<StateDict, StateError>;
    fn load(&mut self, state: &StateDict) -> Result<(), StateError>;
    fn differs(&self) -> bool;
    fn rebuilt(&mut self);
}

impl<H: CommHook> Carries for H {
    fn state(&self) -> Result<StateDict, StateError> {
        self.state_dict()
    }

    fn load(&mut self, state: &StateDict) -> Result<(), StateError> {
        self.load_state_dict(state)
    }

    fn differs(&self) -> bool {
        self.differs_by_rank()
    }

    fn rebuilt(&mut self) {
        self.buckets_rebuilt();
    }
}

/// The hook for the reducer, and for its state.
pub(crate) fn driven(hook: impl CommHook + 'static) -> (Box<dyn BucketHook>, Carried) {
    let hook = Arc::new(Mutex::new(hook));
    (Box::new(driver::Driver::new(hook.clone())), Carried(hook))
}

/// A hook's panic is caught and reported; its state is as it left it.
fn lock<H: ?Sized>(hook: &Mutex<H>) -> MutexGuard<'_, H> {
    hook.lock().unwrap_or_else(PoisonError::into_inner)
}
