//! What lossy hooks carry from pass to pass, as entries of a state: `steps`, and tensors by bucket, `error.3`.

use std::collections::BTreeMap;

use overdrive_core::{Entry, StateDict, StateError, TorchError};
use tch::Tensor;

use super::warm_up::Steps;

/// Entries of one name, by the numbers behind it: of the bucket, and of a gradient in it.
pub(super) type Tensors = BTreeMap<Vec<usize>, Tensor>;

pub(super) const STEPS: &str = "steps";

/// A state with the number of steps.
pub(super) fn of(steps: &Steps) -> StateDict {
    let mut state = StateDict::new();
    state.insert(STEPS, Entry::Int(i64::try_from(steps.done()).unwrap_or(i64::MAX)));
    state
}

/// Adds a tensor.
pub(super) fn insert(state: &mut StateDict, name: &str, numbers: &[usize], tensor: &Tensor) {
    let numbers: Vec<String> = numbers.iter().map(usize::to_string).collect();
    state.insert(format!("{name}.{}", numbers.join(".")), Entry::Tensor(tensor.shallow_clone()));
}

/// The number of steps, and copies of the tensors of each of these names, which have this many numbers.
pub(super) fn read<const N: usize>(
    state: &StateDict,
    names: [(&str, usize); N],
) -> Result<(Steps, [Tensors; N]), StateError> {
    let steps = state.int(STEPS)?;
    let steps = u64::try_from(steps).map_err(|_| StateError::Mismatch {
        key: STEPS.to_owned(),
        expected: "at least 0".to_owned(),
        found: steps.to_string(),
    })?;
    let mut tensors = [(); N].map(|()| Tensors::new());
    for (key, entry) in state.iter().filter(|(key, _)| *key != STEPS) {
        let unknown = || StateError::Unexpected { key: key.to_owned() };
        let (name, numbers) = key.split_once('.').ok_or_else(unknown)?;
        let numbers = numbers.split('.').map(str::parse).collect::<Result<Vec<usize>, _>>().map_err(|_| unknown())?;
        let known = |(known, count): &(&str, usize)| *known == name && *count == numbers.len();
        let at = names.iter().position(known).ok_or_else(unknown)?;
        let Entry::Tensor(tensor) = entry else {
            let (key, expected) = (key.to_owned(), "a tensor".to_owned());
            return Err(StateError::Mismatch { key, expected, found: "a plain value".to_owned() });
        };
        tensors[at].insert(numbers, tensor.f_detach_copy().map_err(TorchError::from)?);
    }
    Ok((Steps::after(steps), tensors))
}
