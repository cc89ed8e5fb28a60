//! Gradients averaged over all ranks at first, later over a sub-group or not at all.

use overdrive_core::{StateDict, StateError};
use overdrive_ffi::c10d::GradBucket;
use tch::Tensor;

use super::warm_up::{Steps, mean};
use super::{CommHook, state};
use crate::error::DdpError;
use crate::group::ProcessGroup;
use crate::work::Work;

/// Averages gradients over all ranks for some steps; after that averages them over a sub-group, or leaves them local.
/// From then on a [`ModelAverager`](crate::ModelAverager) has to average the parameters.
///
/// # Source
/// `post_localSGD_hook`; Lin et al. 2018, arXiv:1808.07217
#[doc(alias = "post_localSGD_hook")]
#[derive(Debug)]
pub struct PostLocalSgd {
    group: ProcessGroup,
    sub_group: Option<ProcessGroup>,
    start_local_sgd_iter: u64,
    steps: Steps,
}

impl PostLocalSgd {
    /// Averages over `group` for `start_local_sgd_iter` steps, then over `sub_group` if there is one.
    pub fn new(group: &ProcessGroup, sub_group: Option<&ProcessGroup>, start_local_sgd_iter: u64) -> Self {
        Self { group: group.clone(), sub_group: sub_group.cloned(), start_local_sgd_iter, steps: Steps::default() }
    }
}

impl CommHook for PostLocalSgd {
    /// `None` where gradients stay local.
    type InFlight = Option<Work<Tensor>>;

    fn start(&mut self, bucket: &GradBucket) -> Result<Option<Work<Tensor>>, DdpError> {
        let group =
            if self.steps.done() < self.start_local_sgd_iter { Some(&self.group) } else { self.sub_group.as_ref() };
        group.map(|group| mean(group, bucket)).transpose()
    }

    fn finish(&mut self, bucket: &GradBucket, in_flight: Option<Work<Tensor>>) -> Result<Tensor, DdpError> {
        let mean = in_flight.map_or_else(|| Ok(bucket.buffer.shallow_clone()), Work::wait)?;
        self.steps.count(bucket);
        Ok(mean)
    }

    fn state_dict(&self) -> Result<StateDict, StateError> {
        Ok(state::of(&self.steps))
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        (self.steps, []) = state::read(state, [])?;
        Ok(())
    }
}
