//! Sends only the largest gradients, with error feedback for the rest.

use std::collections::HashMap;

use overdrive_core::{StateDict, StateError};
use overdrive_ffi::c10d::GradBucket;
use overdrive_ffi::{Arg, LazyOp, compress};
use tch::{Kind, Tensor};

use super::warm_up::{Steps, mean};
use super::{CommHook, state};
use crate::error::DdpError;
use crate::group::ProcessGroup;
use crate::work::Work;

static INDEX_FILL: LazyOp = LazyOp::new("aten::index_fill_", "int_Scalar");
static MASKED_FILL: LazyOp = LazyOp::new("aten::masked_fill_", "Scalar");
static INDEX_ADD: LazyOp = LazyOp::new("aten::index_add_", "");

/// Sends the `share` of each bucket's gradients with the largest absolute values, and adds the others to the next
/// step's gradients (error feedback).
///
/// Of a bucket's n gradients, a rank sends `share * n` values and as many 4-byte indices, and receives those of every
/// other rank.
///
/// # Source
/// Aji and Heafield 2017, arXiv:1704.05021; error feedback: Stich et al. 2018, arXiv:1809.07599
#[derive(Debug)]
pub struct TopK {
    group: ProcessGroup,
    share: f64,
    warm_up_steps: u64,
    steps: Steps,
    /// The sum of what each bucket has left out so far.
    errors: HashMap<usize, Tensor>,
}

/// A bucket's communication under way.
#[derive(Debug)]
pub enum TopKInFlight {
    /// The plain mean of a warm-up step.
    Mean(Work<Tensor>),
    /// Every rank's values and their indices.
    Sparse(Work<Vec<Tensor>>, Work<Vec<Tensor>>),
}

impl TopK {
    /// Sends a share of the gradients, after `warm_up_steps` steps (at least one) that send all. The first step must
    /// send all, because DDP rebuilds the buckets after it.
    ///
    /// # Errors
    /// When the share is not above 0 and at most 1.
    pub fn new(group: &ProcessGroup, share: f64, warm_up_steps: u64) -> Result<Self, DdpError> {
        if !(share > 0.0 && share <= 1.0) {
            let found = share.to_string();
            return Err(DdpError::InvalidOption { option: "share", found, expected: "above 0 and at most 1" });
        }
        let warm_up_steps = warm_up_steps.max(1);
        Ok(Self { group: group.clone(), share, warm_up_steps, steps: Steps::default(), errors: HashMap::new() })
    }
}

impl CommHook for TopK {
    type InFlight = TopKInFlight;

    fn start(&mut self, bucket: &GradBucket) -> Result<TopKInFlight, DdpError> {
        if self.steps.done() < self.warm_up_steps {
            return Ok(TopKInFlight::Mean(mean(&self.group, bucket)?));
        }
        let grads = bucket.buffer.f_detach()?;
        let count = grads.numel() as i64;
        // At least one if there is any, and at most all.
        let kept = ((self.share * count as f64).ceil() as i64).clamp(1.min(count), count);
        let error = match self.errors.remove(&bucket.index).filter(|error| error.numel() == grads.numel()) {
            Some(error) => error.f_to_device(grads.device())?,
            None => grads.f_zeros_like()?,
        };
        let (places, values) = take_largest(&grads, &error, kept)?;
        self.errors.insert(bucket.index, error);
        let values = self.group.all_gather_async(&values)?;
        let places = self.group.all_gather_async(&places)?;
        Ok(TopKInFlight::Sparse(values, places))
    }

    fn finish(&mut self, bucket: &GradBucket, in_flight: TopKInFlight) -> Result<Tensor, DdpError> {
        let mean = match in_flight {
            TopKInFlight::Mean(mean) => mean.wait()?,
            TopKInFlight::Sparse(values, places) => {
                let mean = bucket.buffer.f_detach()?.f_zero_()?;
                let scale = Arg::Double(1.0 / self.group.size() as f64);
                for (values, places) in values.wait()?.iter().zip(&places.wait()?) {
                    let args = [Arg::Tensor(&mean), Arg::Int(0), Arg::Tensor(places), Arg::Tensor(values), scale];
                    INDEX_ADD.call(&args)?;
                }
                mean
            }
        };
        self.steps.count(bucket);
        Ok(mean)
    }

    fn state_dict(&self) -> Result<StateDict, StateError> {
        let mut state = state::of(&self.steps);
        self.errors.iter().for_each(|(bucket, error)| state::insert(&mut state, "error", &[*bucket], error));
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        let (steps, [errors]) = state::read(state, [("error", 1)])?;
        self.errors = errors.into_iter().map(|(numbers, error)| (numbers[0], error)).collect();
        self.steps = steps;
        Ok(())
    }

    fn differs_by_rank(&self) -> bool {
        true
    }

    fn buckets_rebuilt(&mut self) {
        self.errors.clear();
    }
}

/// Adds gradients to `error` in place, and moves its largest numbers out: returns their indices and values.
fn take_largest(grads: &Tensor, error: &Tensor, kept: i64) -> Result<(Tensor, Tensor), DdpError> {
    if compress::takes(grads) && compress::takes(error) {
        return Ok(compress::take_largest(grads, error, kept)?);
    }
    let whole = error.shallow_clone().f_add_(grads)?;
    let (_, places) = whole.f_abs()?.f_topk(kept, 0, true, false)?;
    let values = whole.f_index_select(0, &places)?;
    INDEX_FILL.call(&[Arg::Tensor(&whole), Arg::Int(0), Arg::Tensor(&places), Arg::Double(0.0)])?;
    // An infinity or NaN belongs to this step only; kept in the error, it would be in later steps until all were sent.
    MASKED_FILL.call(&[Arg::Tensor(&whole), Arg::Tensor(&whole.f_isfinite()?.f_logical_not()?), Arg::Double(0.0)])?;
    Ok((places.f_to_kind(Kind::Int)?, values))
}
