//! Local SGD: ranks train alone for some steps, then average their parameters.

use overdrive_core::{Entry, StateDict, StateError, Stateful};
use overdrive_ffi::c10d::ReduceOp;
use tch::Tensor;

use crate::error::DdpError;
use crate::group::ProcessGroup;

/// Averages parameters over ranks every few steps. With [`PostLocalSgd`](crate::hooks::PostLocalSgd) this is post-local
/// SGD; with `no_sync` throughout, local SGD.
///
/// Optimizer states are not averaged, as in PyTorch. Lookahead has to be notified, or its slow weights undo the
/// average: `if averager.average_parameters()? { opt.params_changed()?; }`. Float32 masters need no call.
///
/// Save it with the run: its state is the number of steps, and so its position in the period.
///
/// # Source
/// `torch.distributed.algorithms.model_averaging.averagers.PeriodicModelAverager`; Stich 2018, arXiv:1805.09767; Lin et
/// al. 2018, arXiv:1808.07217
#[doc(alias = "PeriodicModelAverager")]
#[derive(Debug)]
pub struct ModelAverager {
    group: ProcessGroup,
    params: Vec<Tensor>,
    period: u64,
    warm_up_steps: u64,
    steps: u64,
}

impl ModelAverager {
    /// Averages every `period` steps, from step `warm_up_steps` on; before that, gradients are expected to be averaged.
    ///
    /// # Errors
    /// When the period is 0 or there are no parameters.
    pub fn new(group: &ProcessGroup, params: &[Tensor], period: u64, warm_up_steps: u64) -> Result<Self, DdpError> {
        if period == 0 {
            return Err(DdpError::InvalidOption { option: "period", found: "0".to_owned(), expected: "at least 1" });
        }
        if params.is_empty() {
            return Err(DdpError::NoParameters);
        }
        let params = params.iter().map(Tensor::f_detach).collect::<Result<_, _>>()?;
        Ok(Self { group: group.clone(), params, period, warm_up_steps, steps: 0 })
    }

    /// Call it after each optimizer step. Returns whether this call has averaged.
    ///
    /// # Errors
    /// When a parameter is not contiguous, or a rank has exited or does not take part within the group's timeout.
    ///
    /// # Syncs
    /// Every `period` steps, waits for all ranks.
    pub fn average_parameters(&mut self) -> Result<bool, DdpError> {
        let due = self.steps >= self.warm_up_steps && (self.steps - self.warm_up_steps).is_multiple_of(self.period);
        if due {
            // All are started before the first is waited for.
            let works = self.params.iter_mut().map(|param| self.group.all_reduce_async(param, ReduceOp::Avg));
            for work in works.collect::<Result<Vec<_>, _>>()? {
                work.wait()?;
            }
        }
        self.steps += 1;
        Ok(due)
    }
}

/// `step`, as PyTorch's `PostLocalSGDOptimizer` saves it.
impl Stateful for ModelAverager {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        let mut state = StateDict::new();
        state.insert("step", Entry::Int(i64::try_from(self.steps).unwrap_or(i64::MAX)));
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        state.refuse_unknown(&["step"])?;
        let found = state.int("step")?;
        self.steps = u64::try_from(found).map_err(|_| StateError::Mismatch {
            key: "step".to_owned(),
            expected: "at least 0".to_owned(),
            found: found.to_string(),
        })?;
        Ok(())
    }
}
