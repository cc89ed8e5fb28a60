//! One bit a gradient, with the error of both roundings remembered.

use std::collections::HashMap;

use overdrive_ffi::c10d::GradBucket;
use tch::Tensor;

use super::CommHook;
use super::warm_up::{Steps, mean};
use crate::error::DdpError;
use crate::group::ProcessGroup;
use crate::signed_mean::{InFlight, SignedMean};
use crate::work::Work;

/// The compression of 1-bit Adam: each gradient becomes its sign, each rank's bucket one scale, and what the rounding loses
/// is added to the next step's (error feedback), on the rank that sends and again on the one that averages.
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

/// What a bucket has under way.
#[derive(Debug)]
pub struct OneBitInFlight(Stage);

#[derive(Debug)]
enum Stage {
    /// The plain mean of a warm-up step.
    Mean(Work<Tensor>),
    Signs(InFlight),
}

impl OneBit {
    /// Sends signs, after `warm_up_steps` that send all; the first always does, because buckets are put in order behind it.
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
