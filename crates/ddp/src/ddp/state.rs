//! What a resumed run needs to go on to the bit: the buckets, and what the hook carries.

use overdrive_core::{Entry, StateDict, StateError, Stateful, TorchError};
use overdrive_ffi::c10d::BucketLayout;
use tch::{Kind, Tensor};

use super::DistributedDataParallel;
use super::precision::IN_BACKWARD;
use crate::error::DdpError;

/// The numbers of the parameters, bucket after bucket.
const PARAMETERS: &str = "bucket_parameters";
const LENGTHS: &str = "bucket_lengths";
const FINAL: &str = "buckets_are_final";
const HOOK: &str = "hook";

/// The division into buckets, in which sums over more than two ranks are rounded, and what the communication hook
/// carries from pass to pass. Without it a resumed run begins with other buckets, and lossy hooks without their errors.
///
/// Load it on all ranks before the same pass, after registering the hook. With
/// [`static_graph`](super::DdpBuilder::static_graph) there is no such state. PyTorch does not save the division into
/// buckets; of its hooks, a program can save PowerSGD's state.
///
/// `&DistributedDataParallel` is `Stateful` too, since an accumulator borrows it.
impl Stateful for DistributedDataParallel {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        (&self).state_dict()
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        (&*self).load_state_dict(state)
    }

    fn differs_by_rank(&self) -> bool {
        (&self).differs_by_rank()
    }
}

impl Stateful for &DistributedDataParallel {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        self.between_passes()?;
        let layout = self.reducer.borrow().layout()?;
        let mut state = StateDict::new();
        state.insert(PARAMETERS, entry(layout.buckets.iter().flatten().copied())?);
        state.insert(LENGTHS, entry(layout.buckets.iter().map(Vec::len))?);
        state.insert(FINAL, Entry::Bool(layout.is_final));
        if let Some(hook) = &*self.hook.borrow() {
            state.insert_nested(HOOK, hook.lock().state()?);
        }
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        self.between_passes()?;
        let layout = layout(state, self.params.len())?;
        let prefix = format!("{HOOK}.");
        let hook = self.hook.borrow();
        let is_known =
            |key: &str| [PARAMETERS, LENGTHS, FINAL].contains(&key) || hook.is_some() && key.starts_with(&prefix);
        if let Some((key, _)) = state.iter().find(|(key, _)| !is_known(key)) {
            return Err(StateError::Unexpected { key: key.to_owned() });
        }
        let of_hook = state.nested(HOOK);
        // Buckets are of the passes' dtype.
        let _lowered = self.lower().map_err(|error| match error {
            DdpError::Torch(error) => StateError::Torch(error),
            _ => StateError::NotSaved { reason: IN_BACKWARD },
        })?;
        match &*hook {
            Some(hook) => {
                let mut hook = hook.lock();
                let before = hook.state()?;
                hook.load(&of_hook)?;
                // libtorch checks the layout before it changes anything.
                self.reducer.borrow().lay_out(&layout).map_err(|error| match hook.load(&before) {
                    Ok(()) => StateError::Torch(error),
                    Err(error) => error,
                })
            }
            None => Ok(self.reducer.borrow().lay_out(&layout)?),
        }
    }

    fn differs_by_rank(&self) -> bool {
        self.hook.borrow().as_ref().is_some_and(|hook| hook.lock().differs())
    }
}

impl DistributedDataParallel {
    fn between_passes(&self) -> Result<(), StateError> {
        let reason = match (self.is_static, self.reducer.borrow().is_within_backward()) {
            (_, true) => "a backward pass is under way: call it between passes",
            (true, _) => {
                "with static_graph the buckets, and what a hook keeps for them, are made in the first passes of each \
                 process: leave the DistributedDataParallel out of the checkpoint"
            }
            (false, false) => return Ok(()),
        };
        Err(StateError::NotSaved { reason })
    }
}

fn entry(numbers: impl Iterator<Item = usize>) -> Result<Entry, StateError> {
    let numbers: Vec<i64> = numbers.map(|number| number as i64).collect();
    Ok(Entry::Tensor(Tensor::f_from_slice(&numbers).map_err(TorchError::from)?))
}

/// The layout in a state, of this many parameters.
fn layout(state: &StateDict, parameters: usize) -> Result<BucketLayout, StateError> {
    let list = |key: &str| -> Result<Vec<usize>, StateError> {
        let wrong = |found: String| StateError::Mismatch {
            key: key.to_owned(),
            expected: "a list of whole numbers from 0 on".to_owned(),
            found,
        };
        match state.get(key)? {
            Entry::Tensor(tensor) if tensor.defined() && tensor.kind() == Kind::Int64 && tensor.dim() == 1 => {
                let numbers = Vec::<i64>::try_from(tensor).map_err(|error| wrong(error.to_string()))?;
                let numbers =
                    numbers.iter().map(|number| usize::try_from(*number).map_err(|_| wrong(number.to_string())));
                numbers.collect()
            }
            other => Err(wrong(format!("{other:?}"))),
        }
    };
    let (numbers, lengths, is_final) = (list(PARAMETERS)?, list(LENGTHS)?, state.bool(FINAL)?);
    let mut sorted = numbers.clone();
    sorted.sort_unstable();
    if !sorted.into_iter().eq(0..parameters) {
        let expected = format!("the numbers of the model's {parameters} parameters, each once");
        return Err(StateError::Mismatch { key: PARAMETERS.to_owned(), expected, found: format!("{numbers:?}") });
    }
    let adds_up = lengths.iter().try_fold(0usize, |sum, length| sum.checked_add(*length)) == Some(parameters);
    if !adds_up || lengths.contains(&0) {
        let expected = format!("lengths of buckets that add up to {parameters}");
        return Err(StateError::Mismatch { key: LENGTHS.to_owned(), expected, found: format!("{lengths:?}") });
    }
    Ok(BucketLayout::new(&numbers, &lengths, is_final))
}
