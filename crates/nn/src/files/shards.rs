//! Safetensors files that hold a part of a state each, with an index, as on the Hugging Face hub.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Component, Path};

use overdrive_core::StateDict;
use overdrive_core::safetensors::bytes_of;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::safetensors::{read, tensors_of, write};
use super::write::Written;
use super::{Bad, FileError};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// `model.safetensors.index.json`
#[derive(Serialize, Deserialize)]
struct Index {
    #[serde(default)]
    metadata: BTreeMap<String, serde_json::Value>,
    /// The file of each tensor.
    weight_map: BTreeMap<String, String>,
}

/// Reads tensors from a safetensors file; from all files of an index (`model.safetensors.index.json`); or from a folder
/// with either. They are on the CPU.
///
/// # Errors
/// [`FileError::Damaged`] when a file is cut off, is another format, or does not agree with the index;
/// [`FileError::Io`], also for a file of the index that is missing.
///
/// # Source
/// `safetensors.torch.load_file`
#[doc(alias = "load_file")]
pub fn load_safetensors(path: impl AsRef<Path>) -> Result<StateDict, FileError> {
    let path = path.as_ref();
    if path.is_dir() {
        let (single, index) = (path.join(SINGLE), path.join(INDEX));
        return if !single.exists() && index.exists() { read_shards(&index) } else { read(&single) };
    }
    if path.extension().is_some_and(|extension| extension == "json") { read_shards(path) } else { read(path) }
}

fn read_shards(path: &Path) -> Result<StateDict, FileError> {
    let damaged = |what: String| Bad::Damaged(what).at(path);
    let text = fs::read(path).map_err(FileError::io("read", path))?;
    let index: Index = serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
    let files: BTreeSet<&String> = index.weight_map.values().collect();
    // Before any is read.
    if let Some(file) = files.iter().find(|file| !is_beside(file)) {
        return Err(damaged(format!("{file:?} is not the name of a file beside it")));
    }
    let mut state = StateDict::new();
    for file in files {
        for (name, entry) in read(&path.with_file_name(file))? {
            match index.weight_map.get(&name) {
                Some(named) if named == file => state.insert(name, entry),
                Some(named) => return Err(damaged(format!("`{name}` should be in {named:?}, but is in {file:?} too"))),
                None => return Err(damaged(format!("`{name}` of {file:?} is not in the index"))),
            }
        }
    }
    match index.weight_map.iter().find(|(name, _)| state.get(name).is_err()) {
        Some((name, file)) => Err(damaged(format!("`{name}` should be in {file:?}, but is not"))),
        None => Ok(state),
    }
}

/// Whether it names a file in the same folder.
pub(super) fn is_beside(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == name)
}

/// Writes a state dict to a folder, in files with at most `max_shard_bytes` of tensors each:
/// `model-00001-of-00003.safetensors`, .. and `model.safetensors.index.json`; or `model.safetensors` if one is enough. A
/// larger tensor has a file of its own. Such files of an earlier state are removed.
///
/// Every file is complete before the first gets its name. If the program ends while they are renamed, the folder has
/// files of both states.
///
/// # Errors
/// As [`save_safetensors`](super::save_safetensors).
///
/// # Source
/// `huggingface_hub.save_torch_state_dict`
#[doc(alias = "save_torch_state_dict")]
pub fn save_sharded(folder: impl AsRef<Path>, state: &StateDict, max_shard_bytes: u64) -> Result<(), FileError> {
    let folder = folder.as_ref();
    let tensors = tensors_of(folder, state)?;
    let total_size: usize = tensors.iter().map(|(_, tensor)| bytes_of(tensor)).sum();
    let shards = split(tensors, max_shard_bytes);
    fs::create_dir_all(folder).map_err(FileError::io("make", folder))?;
    let (mut written, mut kept) = (Vec::new(), BTreeSet::new());
    let mut weight_map = BTreeMap::new();
    let count = shards.len();
    for (number, shard) in shards.into_iter().enumerate() {
        let name = match count {
            1 => SINGLE.to_owned(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
        };
        weight_map.extend(shard.iter().map(|(key, _)| ((*key).to_owned(), name.clone())));
        written.push(write(&folder.join(&name), shard, &[])?);
        kept.insert(name);
    }
    if count > 1 {
        let metadata = BTreeMap::from([("total_size".to_owned(), total_size.into())]);
        written.push(write_index(&folder.join(INDEX), &Index { metadata, weight_map })?);
        kept.insert(INDEX.to_owned());
    }
    written.into_iter().try_for_each(Written::publish)?;
    remove_others(folder, &kept)
}

/// The tensors of each file, chosen as `huggingface_hub` does.
fn split<'a>(tensors: Vec<(&'a str, &'a Tensor)>, most: u64) -> Vec<Vec<(&'a str, &'a Tensor)>> {
    let (mut shards, mut shard, mut bytes) = (Vec::new(), Vec::new(), 0);
    for (key, tensor) in tensors {
        let size = bytes_of(tensor) as u64;
        if size > most {
            shards.push(vec![(key, tensor)]);
            continue;
        }
        if bytes + size > most {
            shards.push(std::mem::take(&mut shard));
            bytes = 0;
        }
        shard.push((key, tensor));
        bytes += size;
    }
    if !shard.is_empty() || shards.is_empty() {
        shards.push(shard);
    }
    shards
}

fn write_index(path: &Path, index: &Index) -> Result<Written, FileError> {
    Written::new(path, |mut file: &File| {
        let text = serde_json::to_vec_pretty(index).map_err(std::io::Error::from);
        text.and_then(|text| file.write_all(&text)).map_err(FileError::io("write", path))
    })
}

/// Removes the files of an earlier state.
fn remove_others(folder: &Path, kept: &BTreeSet<String>) -> Result<(), FileError> {
    for entry in fs::read_dir(folder).map_err(FileError::io("read", folder))? {
        let entry = entry.map_err(FileError::io("read", folder))?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        if !kept.contains(&name) && (name == SINGLE || name == INDEX || is_shard(&name)) {
            fs::remove_file(entry.path()).map_err(FileError::io("remove", &entry.path()))?;
        }
    }
    Ok(())
}

/// Whether a file is named `model-00001-of-00003.safetensors`.
fn is_shard(name: &str) -> bool {
    let numbers = name.strip_prefix("model-").and_then(|rest| rest.strip_suffix(".safetensors"));
    let numbers = numbers.and_then(|numbers| numbers.split_once("-of-"));
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    numbers.is_some_and(|(number, count)| is_number(number) && is_number(count))
}
