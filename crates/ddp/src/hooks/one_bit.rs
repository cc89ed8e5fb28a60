//! One bit a gradient, with the error of both roundings remembered.

use std::collections::HashMap;

use overdrive_ffi::c10d::GradBucket;
use tch::{Device, Kind, Tensor};

use super::warm_up::{Steps, mean};
use super::{CommHook, signs};
use crate::error::DdpError;
use crate::group::ProcessGroup;
use crate::work::Work;

/// The compression of 1-bit Adam: each gradient becomes its sign, each rank's bucket one scale, and what the rounding loses
/// is added to the next step's (error feedback), on the rank that sends and again on the one that averages.
///
/// It compresses gradients. 1-bit Adam itself sends momentum behind a warm-up with the variance frozen; with Adam,
/// give this hook a warm-up long enough for the second moments to settle.
///
/// # Source
/// Tang et al. 2021, arXiv:2102.02888 (1-bit Adam), algorithm 1's compressed all-reduce
#[doc(alias = "OneBitAdam")]
#[derive(Debug)]
pub struct OneBit {
    group: ProcessGroup,
    warm_up_steps: u64,
    steps: Steps,
    /// By bucket: what this rank's signs have lost, and what the signs of its part of the mean have.
    errors: HashMap<usize, (Tensor, Tensor)>,
}

/// What a bucket has under way.
#[derive(Debug)]
pub enum OneBitInFlight {
    /// The plain mean of a warm-up step.
    Mean(Work<Tensor>),
    /// Every rank's signs of this rank's part, and their scales.
    Signs(Work<Tensor>, Work<Vec<Tensor>>),
}

impl OneBit {
    /// Sends signs, after `warm_up_steps` that send all; the first always does, because buckets are put in order behind it.
    pub fn new(group: &ProcessGroup, warm_up_steps: u64) -> Self {
        Self {
            group: group.clone(),
            warm_up_steps: warm_up_steps.max(1),
            steps: Steps::default(),
            errors: HashMap::new(),
        }
    }
}

impl CommHook for OneBit {
    type InFlight = OneBitInFlight;

    fn start(&mut self, bucket: &GradBucket) -> Result<OneBitInFlight, DdpError> {
        if self.steps.done() < self.warm_up_steps {
            return Ok(OneBitInFlight::Mean(mean(&self.group, bucket)?));
        }
        let (padded, part) = self.padded(bucket);
        let like = &bucket.buffer;
        let fits = |(own, _): &(Tensor, Tensor)| own.numel() as i64 == padded;
        let errors = match self.errors.remove(&bucket.index).filter(fits) {
            Some(errors) => errors,
            None => (like.f_new_zeros([padded], kind(like))?, like.f_new_zeros([part], kind(like))?),
        };
        let (signs, scale) = signs::compress(&like.f_detach()?, &errors.0)?;
        self.errors.insert(bucket.index, errors);
        let mut received = signs.f_empty_like()?;
        let work = self.group.all_to_all_single_async(&mut received, &signs, None)?;
        let signs = work.and_then(move |()| Ok(received));
        let scales = self.group.all_gather_async(&scale)?;
        Ok(OneBitInFlight::Signs(signs, scales))
    }

    fn finish(&mut self, bucket: &GradBucket, in_flight: OneBitInFlight) -> Result<Tensor, DdpError> {
        let mean = match in_flight {
            OneBitInFlight::Mean(mean) => mean.wait()?,
            OneBitInFlight::Signs(signs, scales) => self.average(bucket, &signs.wait()?, &scales.wait()?)?,
        };
        self.steps.count(bucket);
        Ok(mean)
    }
}

impl OneBit {
    /// A bucket's length in whole bytes of signs for every rank's part, and the length of a part.
    fn padded(&self, bucket: &GradBucket) -> (i64, i64) {
        let (ranks, count) = (self.group.size() as i64, bucket.buffer.numel() as i64);
        let part = (count + 8 * ranks - 1) / (8 * ranks) * 8;
        (part * ranks, part)
    }

    /// Averages this rank's part, and gathers all parts as signs again, into the bucket's buffer.
    fn average(&mut self, bucket: &GradBucket, signs: &Tensor, scales: &[Tensor]) -> Result<Tensor, DdpError> {
        let ranks = self.group.size() as i64;
        let (_, part) = self.padded(bucket);
        let buffer = bucket.buffer.f_detach()?;
        // How much of a rank's part is gradients and not padding.
        let real = |rank: i64| (buffer.numel() as i64 - part * rank).clamp(0, part);
        let mean = buffer.f_new_empty([real(self.group.rank() as i64)], kind(&buffer))?;
        for (rank, (signs, scale)) in signs.f_chunk(ranks, 0)?.iter().zip(scales).enumerate() {
            signs::expand(signs, scale, 1.0 / ranks as f64, &mean, rank > 0)?;
        }
        let (_, error) = self.errors.get(&bucket.index).ok_or(DdpError::NoParameters)?;
        let (signs, scale) = signs::compress(&mean, error)?;
        let signs = self.group.all_gather_async(&signs)?;
        let scales = self.group.all_gather(&scale)?;
        for (rank, (signs, scale)) in (0..).zip(signs.wait()?.iter().zip(&scales)) {
            let start = (part * rank).min(buffer.numel() as i64);
            signs::expand(signs, scale, 1.0, &buffer.f_narrow(0, start, real(rank))?, false)?;
        }
        Ok(buffer)
    }
}

fn kind(like: &Tensor) -> (Kind, Device) {
    (like.kind(), like.device())
}
