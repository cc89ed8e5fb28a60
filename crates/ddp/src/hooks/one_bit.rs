//! One bit per gradient, with error feedback for both roundings.

use std::collections::HashMap;

use overdrive_core::{StateDict, StateError};
use overdrive_ffi::c10d::GradBucket;
use tch::Tensor;

use super::CommHook;
use super::state::{self, Tensors};
use super::warm_up::{Steps, mean};
use crate::error::DdpError;
use crate::group::ProcessGroup;
use crate::signed_mean::{InFlight, SignedMean};
use crate::work::Work;

/// The rounding errors in a state.
const OWN: &str = "own_error";
const MEAN: &str = "mean_error";

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
    /// The errors of a loaded state, own and of the mean, of buckets that were not reduced since.
    loaded: [Tensors; 2],
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
            loaded: Default::default(),
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
            None => {
                let mut signed = SignedMean::new(&self.group, &values)?;
                let [own, mean] = self.loaded.each_mut().map(|errors| errors.remove(&[bucket.index][..]));
                if let (Some(own), Some(mean)) = (own, mean)
                    && (own.size(), mean.size()) == (signed.own.size(), signed.mean.size())
                {
                    signed.own.f_copy_(&own)?;
                    signed.mean.f_copy_(&mean)?;
                }
                signed
            }
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

    fn state_dict(&self) -> Result<StateDict, StateError> {
        let mut state = state::of(&self.steps);
        for (bucket, signed) in &self.means {
            state::insert(&mut state, OWN, &[*bucket], &signed.own);
            state::insert(&mut state, MEAN, &[*bucket], &signed.mean);
        }
        for (name, errors) in [OWN, MEAN].into_iter().zip(&self.loaded) {
            errors.iter().for_each(|(numbers, error)| state::insert(&mut state, name, numbers, error));
        }
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        (self.steps, self.loaded) = state::read(state, [(OWN, 1), (MEAN, 1)])?;
        self.means.clear();
        Ok(())
    }

    fn differs_by_rank(&self) -> bool {
        true
    }

    fn buckets_rebuilt(&mut self) {
        self.means.clear();
        self.loaded = Default::default();
    }
}
