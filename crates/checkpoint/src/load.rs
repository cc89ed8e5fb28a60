//! Loading all parts or none.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use overdrive_core::{Entry, StateDict, StateError, Stateful, TorchError};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tch::{Device, Tensor};

use crate::error::CheckpointError;
use crate::read::{Saved, read};

/// What a checkpoint holds beside its parts.
#[derive(Debug)]
#[non_exhaustive]
pub struct Loaded {
    /// The step that it was saved at.
    pub step: u64,
    pub(crate) fields: BTreeMap<String, Value>,
}

impl Loaded {
    /// A field of the run's own; none where there is none.
    ///
    /// # Errors
    /// [`CheckpointError::Field`] for a field of another type.
    pub fn get<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, CheckpointError> {
        let value = self.fields.get(name).map(|value| T::deserialize(value));
        value.transpose().map_err(|error| CheckpointError::Field { name: name.to_owned(), error })
    }
}

/// Loads parts of the checkpoint in this folder, `step-000000000200` say; other parts of it are left alone.
///
/// For a model without its optimizer, and for what `docs/export_pt.py` makes of PyTorch's files. All parts are
/// loaded or none, as in [`Checkpoint::resume`](crate::Checkpoint::resume).
///
/// # Errors
/// As [`Checkpoint::resume`](crate::Checkpoint::resume); damage is an error here.
///
/// # Syncs
/// As the parts' `load_state_dict` do.
pub fn load(folder: impl AsRef<Path>, parts: &mut [(&str, &mut dyn Stateful)]) -> Result<Loaded, CheckpointError> {
    load_all(read(folder.as_ref(), None)?, parts, false)
}

/// Every part checks all of its own state before it changes. When one refuses, those before it are put back.
pub(crate) fn load_all(
    saved: Saved,
    parts: &mut [(&str, &mut dyn Stateful)],
    all_of_them: bool,
) -> Result<Loaded, CheckpointError> {
    check_names(parts.iter().map(|(name, _)| *name))?;
    let asked: BTreeSet<&str> = parts.iter().map(|(name, _)| *name).collect();
    let there: BTreeSet<&str> = saved.parts.keys().map(String::as_str).collect();
    if !asked.is_subset(&there) || (all_of_them && asked != there) {
        let names = |names: BTreeSet<&str>| names.into_iter().map(str::to_owned).collect();
        return Err(CheckpointError::Parts { path: saved.folder, expected: names(asked), found: names(there) });
    }
    let mut before: Vec<StateDict> = Vec::new();
    for at in 0..parts.len() {
        let last = at + 1 == parts.len();
        let (name, part) = &mut parts[at];
        let part_error = |error| CheckpointError::Part { part: (*name).to_owned(), error };
        let copy = match last {
            true => Ok(StateDict::new()),
            false => part.state_dict().and_then(|state| copy_to_host(&state)),
        };
        let loaded = copy.and_then(|copy| {
            part.load_state_dict(&saved.parts[*name])?;
            Ok(copy)
        });
        match loaded {
            Ok(copy) => before.push(copy),
            Err(error) => {
                let error = part_error(error);
                return Err(put_back(&before, parts, error));
            }
        }
    }
    Ok(Loaded { step: saved.step, fields: saved.fields })
}

fn put_back(before: &[StateDict], parts: &mut [(&str, &mut dyn Stateful)], error: CheckpointError) -> CheckpointError {
    let mut result = error;
    for (state, (other, part)) in before.iter().zip(parts) {
        if let Err(cause) = part.load_state_dict(state)
            && let CheckpointError::Part { part, error } = result
        {
            let other = (*other).to_owned();
            result = CheckpointError::NotPutBack { part, error: Box::new(error), other, cause: Box::new(cause) };
        }
    }
    result
}

fn copy_to_host(state: &StateDict) -> Result<StateDict, StateError> {
    let host = |tensor: &Tensor| {
        let copy = tensor.f_detach()?.f_to_device(Device::Cpu)?;
        copy.f_to_dtype(copy.kind(), false, true)
    };
    let mut copy = StateDict::new();
    for (key, entry) in state.iter() {
        let entry = match entry {
            Entry::Tensor(tensor) => Entry::Tensor(host(tensor).map_err(TorchError::from)?),
            Entry::Bool(value) => Entry::Bool(*value),
            Entry::Int(value) => Entry::Int(*value),
            Entry::Float(value) => Entry::Float(*value),
            Entry::Text(value) => Entry::Text(value.clone()),
        };
        copy.insert(key, entry);
    }
    Ok(copy)
}

/// A name is a file's, on any system.
pub(crate) fn check_names<'a>(names: impl Iterator<Item = &'a str>) -> Result<(), CheckpointError> {
    let mut seen = BTreeSet::new();
    for name in names {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
        let fits = (1..=100).contains(&name.len()) && name.bytes().all(plain) && !name.starts_with('.');
        let expected = match (fits, seen.insert(name.to_ascii_lowercase())) {
            (false, _) => "1 to 100 letters, digits, `_`, `-` and `.`, and no `.` at first",
            (true, false) => "a name that no other part has, capitals or not",
            (true, true) => continue,
        };
        return Err(CheckpointError::PartName { name: name.to_owned(), expected });
    }
    Ok(())
}
