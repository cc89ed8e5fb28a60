//! Loading all parts or none.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use overdrive_core::{StateDict, StateError, Stateful, TorchError};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tch::Device;

use crate::error::CheckpointError;
use crate::manifest::Manifest;
use crate::names::check_names;
use crate::read::{read_entries, read_parts};

/// A checkpoint's step and fields.
#[derive(Debug)]
#[non_exhaustive]
pub struct Loaded {
    /// The step that it was saved at.
    pub step: u64,
    pub(crate) fields: BTreeMap<String, Value>,
}

impl Loaded {
    /// A field; none if there is no such field.
    ///
    /// # Errors
    /// [`CheckpointError::Field`] for a field of another type.
    pub fn get<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, CheckpointError> {
        let value = self.fields.get(name).map(|value| T::deserialize(value));
        value.transpose().map_err(|error| CheckpointError::Field { name: name.to_owned(), error })
    }
}

/// Loads some parts of the checkpoint in this folder, `step-000000000200` say; its other parts are not read.
///
/// For a model without its optimizer, and for PyTorch files converted by `docs/export_pt.py`. All given parts are
/// loaded or none, as in [`Checkpoint::resume`](crate::Checkpoint::resume).
///
/// # Errors
/// Those of [`Checkpoint::resume`](crate::Checkpoint::resume); damage is an error here.
///
/// # Syncs
/// As the parts' `load_state_dict` do.
pub fn load(folder: impl AsRef<Path>, parts: &mut [(&str, &mut dyn Stateful)]) -> Result<Loaded, CheckpointError> {
    let folder = folder.as_ref();
    check_names(parts.iter().map(|(name, _)| *name))?;
    let manifest = Manifest::read(folder)?;
    let asked: BTreeSet<&str> = parts.iter().map(|(name, _)| *name).collect();
    check_parts(folder, &asked, &names(&manifest.parts), false)?;
    let mut saved = read_parts(folder, manifest, |name| asked.contains(name))?;
    load_all(&mut saved.parts, parts, false)?;
    Ok(Loaded { step: saved.step, fields: saved.fields })
}

/// Reads the `wanted` entries of one part of the checkpoint in this folder, some layers of a large model say. Of
/// everything else, only the names are read.
///
/// ```
/// # use overdrive_checkpoint::{Checkpoint, read_part};
/// # use tch::{Device, nn};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// let vs = nn::VarStore::new(Device::Cpu);
/// let _backbone = nn::linear(vs.root() / "backbone", 4, 4, Default::default());
/// let _head = nn::linear(vs.root() / "head", 4, 2, Default::default());
/// let mut checkpoint = Checkpoint::builder(folder.path()).build()?;
/// checkpoint.save(1, &[("model", &vs)])?;
/// checkpoint.wait()?;
/// let backbone = read_part(checkpoint.path(1), "model", |name| name.starts_with("backbone."))?;
/// assert_eq!(backbone.len(), 2);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// When the checkpoint has no such part ([`CheckpointError::Parts`]), or what is read is damaged.
///
/// # Syncs
/// No.
///
/// # Source
/// `safetensors.safe_open`
pub fn read_part(
    folder: impl AsRef<Path>,
    part: &str,
    wanted: impl Fn(&str) -> bool,
) -> Result<StateDict, CheckpointError> {
    let folder = folder.as_ref();
    let mut manifest = Manifest::read(folder)?;
    check_parts(folder, &BTreeSet::from([part]), &names(&manifest.parts), false)?;
    match manifest.parts.remove(part) {
        Some(found) => read_entries(folder, part, found, Some(&wanted)),
        None => Ok(StateDict::new()),
    }
}

pub(crate) fn names<T>(parts: &BTreeMap<String, T>) -> BTreeSet<&str> {
    parts.keys().map(String::as_str).collect()
}

fn check_parts(
    folder: &Path,
    asked: &BTreeSet<&str>,
    there: &BTreeSet<&str>,
    all_of_them: bool,
) -> Result<(), CheckpointError> {
    if asked.is_subset(there) && (!all_of_them || asked == there) {
        return Ok(());
    }
    let names = |names: &BTreeSet<&str>| names.iter().map(|name| (*name).to_owned()).collect();
    Err(CheckpointError::Parts { path: folder.to_path_buf(), expected: names(asked), found: names(there) })
}

/// The states of the parts before loading.
pub(crate) struct Before(Vec<StateDict>);

impl Before {
    /// Restores all parts, because another rank failed.
    pub fn put_back(&self, parts: &mut [(&str, &mut dyn Stateful)], error: CheckpointError) -> CheckpointError {
        put_back(&self.0, parts, error)
    }
}

/// Loads all parts of a checkpoint. Every part checks its whole state before it changes; if one refuses, the parts
/// before it are restored. With `copies`, returns the previous states of all parts. Takes the states out of `saved`, so
/// that a part may keep their tensors.
pub(crate) fn load_all(
    saved: &mut BTreeMap<String, StateDict>,
    parts: &mut [(&str, &mut dyn Stateful)],
    copies: bool,
) -> Result<Before, CheckpointError> {
    let mut before: Vec<StateDict> = Vec::new();
    for at in 0..parts.len() {
        let last = at + 1 == parts.len();
        let (name, part) = &mut parts[at];
        let part_error = |error| CheckpointError::Part { part: (*name).to_owned(), error };
        let copy = match last && !copies {
            true => Ok(StateDict::new()),
            false => part.state_dict().and_then(|state| copy_to_host(&state)),
        };
        let loaded = copy.and_then(|copy| {
            part.assign_state_dict(saved.remove(*name).unwrap_or_default())?;
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
    Ok(Before(before))
}

/// Refuses parts that are not exactly those of the checkpoint in this folder.
pub(crate) fn check_all_parts<'a>(
    folder: &Path,
    there: &BTreeSet<&str>,
    asked: impl Iterator<Item = &'a str> + Clone,
) -> Result<(), CheckpointError> {
    check_names(asked.clone())?;
    check_parts(folder, &asked.collect(), there, true)
}

fn put_back(before: &[StateDict], parts: &mut [(&str, &mut dyn Stateful)], error: CheckpointError) -> CheckpointError {
    let mut result = error;
    for (state, (other, part)) in before.iter().zip(parts) {
        if let Err(cause) = part.load_state_dict(state) {
            let other = (*other).to_owned();
            result = CheckpointError::NotPutBack { error: Box::new(result), other, cause: Box::new(cause) };
        }
    }
    result
}

fn copy_to_host(state: &StateDict) -> Result<StateDict, StateError> {
    state.with_tensors(|tensor| {
        let copy = tensor.f_detach().and_then(|tensor| tensor.f_to_device(Device::Cpu));
        Ok(copy.and_then(|copy| copy.f_to_dtype(copy.kind(), false, true)).map_err(TorchError::from)?)
    })
}
