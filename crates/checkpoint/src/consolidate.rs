//! One file of what ranks have saved together.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::Path;

use overdrive_core::safetensors::{FORMAT_KEY, Layout, Unsupported};
use overdrive_core::{Entry, TorchError};
use tch::{Device, Tensor};

use crate::aside::Aside;
use crate::error::{CheckpointError, Context};
use crate::folder::Folder;
use crate::outline::Outline;
use crate::run::Run;
use crate::together::Together;

/// Writes one part of a checkpoint as one safetensors file, which Python's `safetensors` reads: whole tensors, from the
/// parts of all ranks. The step is returned, by default the newest that all ranks have.
///
/// `folder` is that of the run, in which the ranks' folders are. Memory for one mebibyte of tensors is needed. Values that
/// are not tensors are in the file's metadata, as JSON; tied tensors are written once, as by `safetensors.torch.save_model`.
/// The file is written under another name, synced and renamed: several may write it at once. The program
/// `overdrive-checkpoint consolidate` calls this.
///
/// # Errors
/// [`CheckpointError::NoRun`], [`CheckpointError::NoSuchStep`], [`CheckpointError::Parts`];
/// [`CheckpointError::OtherRanks`] of a part that is no whole, such as random generators, of which each rank's own file
/// is whole, `rank-0/step-N/PART.safetensors` say; [`CheckpointError::RanksDiffer`], for which there is
/// [`consolidate_from_rank_0`]; [`CheckpointError::Damaged`] when a rank's part is missing or damaged, and
/// [`CheckpointError::OtherRun`] when it is of another run; [`CheckpointError::Io`].
///
/// # Syncs
/// No.
///
/// # Source
/// `torch.distributed.checkpoint.format_utils.dcp_to_torch_save`; DeepSpeed's `zero_to_fp32.py`
pub fn consolidate(
    folder: impl AsRef<Path>,
    step: Option<u64>,
    part: &str,
    file: impl AsRef<Path>,
) -> Result<u64, CheckpointError> {
    consolidate_of(folder.as_ref(), step, part, file.as_ref(), BTreeSet::new())
}

/// As [`consolidate`]; where ranks have different states that are no shards, such as the running statistics of a sharded
/// model, the file has rank 0's.
///
/// # Errors
/// Those of [`consolidate`], but for [`CheckpointError::RanksDiffer`].
///
/// # Syncs
/// No.
pub fn consolidate_from_rank_0(
    folder: impl AsRef<Path>,
    step: Option<u64>,
    part: &str,
    file: impl AsRef<Path>,
) -> Result<u64, CheckpointError> {
    consolidate_of(folder.as_ref(), step, part, file.as_ref(), BTreeSet::from([part.to_owned()]))
}

fn consolidate_of(
    folder: &Path,
    step: Option<u64>,
    part: &str,
    file: &Path,
    from_rank_0: BTreeSet<String>,
) -> Result<u64, CheckpointError> {
    let together = find(folder, step, &from_rank_0)?;
    write(&together, part, file)?;
    Ok(together.step)
}

/// The checkpoint of this step, or the newest that is complete.
fn find(folder: &Path, step: Option<u64>, from_rank_0: &BTreeSet<String>) -> Result<Together, CheckpointError> {
    let no_run = |reason| Err(CheckpointError::NoRun { folder: folder.to_path_buf(), reason });
    match std::fs::metadata(folder) {
        Ok(found) if !found.is_dir() => return no_run("it is no folder".to_owned()),
        Ok(_) => {}
        Err(error) => return no_run(error.to_string()),
    }
    let found = Run::new(folder, None).steps(&Folder::reading(folder))?;
    if found.is_empty() {
        return no_run("there are no checkpoints in it".to_owned());
    }
    let open = |step| Together::open(folder, step, from_rank_0);
    if let Some(step) = step {
        return match found.contains(&step) {
            true => open(step),
            false => Err(CheckpointError::NoSuchStep { folder: folder.to_path_buf(), step, found }),
        };
    }
    let mut incomplete = None;
    for &step in found.iter().rev() {
        match open(step) {
            Err(error) if error.is_damage() => incomplete = incomplete.or(Some(error)),
            other => return other,
        }
    }
    Err(incomplete.unwrap_or(CheckpointError::NoSuchStep { folder: folder.to_path_buf(), step: 0, found }))
}

fn write(together: &Together, part: &str, file: &Path) -> Result<(), CheckpointError> {
    let outline = together.outline(part)?;
    let unsupported = |Unsupported { key, expected, found }| {
        let part = part.to_owned();
        CheckpointError::Unsupported { part, key, expected, found }
    };
    let (tied, stand_ins) = (outline.tied(), stand_ins(&outline)?);
    let values = values(&outline, part)?;
    let mut metadata: BTreeMap<&str, &str> = values.iter().map(|(key, text)| (key.as_str(), text.as_str())).collect();
    metadata.extend(tied.iter().map(|(name, kept)| (*name, *kept)));
    metadata.insert(FORMAT_KEY, "pt");
    let tensors = stand_ins.iter().filter(|(key, _)| !tied.contains_key(key.as_str()));
    let tensors = tensors.map(|(key, tensor)| (key.as_str(), tensor)).collect();
    let layout = Layout::of(tensors, &metadata).map_err(unsupported)?;

    let aside = Aside::new(file)?;
    let put = |bytes: &[u8]| (&aside.file).write_all(bytes).when("write to it", file);
    put(&layout.header)?;
    for (key, _) in &layout.tensors {
        if let Some(tensor) = outline.tensors.get(*key) {
            together.rows(part, key, tensor, tensor.rows(), put)?;
        }
    }
    aside.publish(file)
}

/// Tensors of the same shapes and dtypes, which take no memory.
fn stand_ins(outline: &Outline) -> Result<Vec<(String, Tensor)>, CheckpointError> {
    let mut all = Vec::new();
    for (key, tensor) in &outline.tensors {
        let number = Tensor::f_empty(&[0i64; 0][..], (tensor.kind, Device::Cpu));
        let stand_in = number.and_then(|number| number.f_expand(&tensor.shape[..], false));
        all.push((key.clone(), stand_in.map_err(TorchError::from)?));
    }
    Ok(all)
}

/// The values that are not tensors, as JSON.
fn values(outline: &Outline, part: &str) -> Result<Vec<(String, String)>, CheckpointError> {
    let mut values = Vec::new();
    for (key, entry) in outline.values.iter() {
        let text = match entry {
            Entry::Tensor(_) => continue,
            Entry::Bool(value) => value.to_string(),
            Entry::Int(value) => value.to_string(),
            // JSON has no infinities: these are texts.
            Entry::Float(value) if !value.is_finite() => format!("\"{value}\""),
            Entry::Float(value) => format!("{value:?}"),
            Entry::Text(value) => serde_json::to_string(value)
                .map_err(|error| CheckpointError::Field { name: format!("{part}: {key}"), error })?,
        };
        values.push((key.to_owned(), text));
    }
    Ok(values)
}
