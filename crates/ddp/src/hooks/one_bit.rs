//! One bit per gradient, with error feedback for both roundings.

use std::collections::HashMap;

use overdrive_ffi::c10d::GradBucket;
use tch::Tensor;

use super::CommHook;
use super::warm_up::{Steps, mean};
use crate::error::DdpError;
use crate::group::ProcessGroup;
use crate::signed_mean::{InFlight, SignedMean};
use crate::work::Work;

/// The compression of 1-bit Adam: each gradient is sent as its sign, with one scale for each rank's bucket. The
/// rounding error is added to the next step's gradients (error feedback), both on the rank that sends and on the one
/// that averages.
///
/// It compresses gradients, for any optimizer. 1-bit Adam itself sends momentum: [`OneBitAdam`](crate::OneBitAdam).
///
/// # Source
/// Tang et al. 2021, arXiv:2102.02888 (1-bit Adam), algorithm 1's compressed all-reduce
#[derive(Debug)]
pub struct OneBit {
    group: ProcessGroup,
    warm_up_steps: u64,
    steps: Steps,
    /// By bucket.
    means: HashMap<usize, SignedMean>,
}

/// A bucket's communication under way.
#[derive(Debug)]
pub struct OneBitInFlight(Stage);

#[derive(Debug)]
enum Stage {
    /// The plain mean of a warm-up step.
    Mean(Work<Tensor>),
    Signs(InFlight),
}

impl OneBit {
    /// Sends signs, after `warm_up_steps` steps that send whole gradients. The first step always does, because DDP
    /// rebuilds the buckets after it.
    pub fn new(group: &ProcessGroup, warm_up_steps: u64) -> Self {
        Self {
            group: group.clone(),
            warm_up_steps: warm_up_steps.max(1),
            steps: Steps::default(),
            means: HashMap::new(),
        }
    }
}

impl CommHook for OneBit {
    type InFlight = OneBitInFlight;

    fn start(&mut self, bucket: &GradBucket) -> Result<OneBitInFlight, DdpError> {
        if self.steps.done() < self.warm_up_steps {
            return Ok(OneBitInFlight(Stage::Mean(mean(&self.group, bucket)?)));
        }
        let values = bucket.buffer.f_detach()?;
        let signed = match self.means.remove(&bucket.index).filter(|signed| signed.fits(&values)) {
            Some(signed) => signed,
            None => SignedMean::new(&self.group, &values)?,
        };
        let in_flight = signed.start(&values)?;
        self.means.insert(bucket.index, signed);
        Ok(OneBitInFlight(Stage::Signs(in_flight)))
    }

    fn finish(&mut self, bucket: &GradBucket, in_flight: OneBitInFlight) -> Result<Tensor, DdpError> {
        let mean = match in_flight.0 {
            Stage::Mean(mean) => mean.wait()?,
            Stage::Signs(signs) => {
                let signed = self.means.get(&bucket.index).ok_or(DdpError::NoParameters)?;
                let mean = bucket.buffer.f_detach()?;
                signed.finish(signs, &mean)?;
                mean
            }
        };
        self.steps.count(bucket);
        Ok(mean)
    }
}
