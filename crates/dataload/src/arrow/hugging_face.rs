//! Datasets that Hugging Face's `datasets` has saved.

use std::collections::{BTreeMap, HashSet};
use std::path::{Component, Path, PathBuf};

use serde_json::Value;

use super::dataset::ArrowDataset;
use crate::DataError;
use crate::read::{first_of, read_file};

const STATE: &str = "state.json";
const SPLITS: &str = "dataset_dict.json";
/// The largest size of a JSON file that is read. A list of data files takes about a hundred bytes per file.
const MAX_JSON_BYTES: u64 = 1 << 26;
/// How much of a text that may be of any length an error shows, in characters.
const SHOWN: usize = 100;

impl ArrowDataset {
    /// Opens a folder that `datasets` has saved a dataset to: its Arrow files, in the order of `state.json`.
    ///
    /// A format that was set (`set_format`) is ignored: [`select`](Self::select) columns here.
    ///
    /// # Errors
    /// [`DataError::Io`]; [`DataError::Layout`] for a folder of several splits (see
    /// [`load_splits`](Self::load_splits)), for a dataset with an order of its own, which `flatten_indices` applies,
    /// for JSON that does not list data files or lists one twice, and for files outside of the folder; as
    /// [`from_files`](Self::from_files).
    ///
    /// # Source
    /// `datasets.load_from_disk` of a `Dataset`.
    pub fn load_from_disk(folder: impl AsRef<Path>) -> Result<Self, DataError> {
        let folder = folder.as_ref();
        let path = folder.join(STATE);
        let known = [path.clone(), folder.join(SPLITS)];
        if first_of(&known)?.is_some_and(|found| *found != path) {
            let found = format!("one of the splits {:?}", splits(folder)?);
            return Err(DataError::layout(folder, "the folder of a single dataset, or `load_splits`", found));
        }
        let state = json(&path)?;
        let has_indices = |key: &str| state[key].as_array().is_some_and(|files| !files.is_empty());
        if ["_indices_files", "_indices_data_files"].into_iter().any(has_indices) {
            return Err(DataError::layout(&path, "rows in the files' order (`flatten_indices`)", "a list of indices"));
        }
        let expected = || "`_data_files`, a list of entries with a `filename` each";
        let files = state["_data_files"].as_array().ok_or_else(|| DataError::layout(&path, expected(), "none"))?;
        let mut names = HashSet::new();
        let files = files.iter().map(|file| match file["filename"].as_str() {
            Some(name) if !names.insert(name) => {
                Err(DataError::layout(&path, "each data file once", format!("{name:?} again")))
            }
            Some(name) => inside(folder, name, &path),
            None => Err(DataError::layout(&path, expected(), shortened(file))),
        });
        Self::from_files(files.collect::<Result<Vec<_>, _>>()?)
    }

    /// Opens the folder of a `DatasetDict`: its datasets, by the names of the splits.
    ///
    /// ```no_run
    /// use overdrive_dataload::{ArrowDataset, Dataset};
    ///
    /// let splits = ArrowDataset::load_splits("imdb")?;
    /// println!("{} reviews to train on, {} to test", splits["train"].len(), splits["test"].len());
    /// # Ok::<(), overdrive_dataload::DataError>(())
    /// ```
    ///
    /// # Errors
    /// [`DataError::Io`]; [`DataError::Layout`] for a folder without splits; as
    /// [`load_from_disk`](Self::load_from_disk).
    ///
    /// # Source
    /// `datasets.load_from_disk` of a `DatasetDict`.
    #[doc(alias = "DatasetDict")]
    pub fn load_splits(folder: impl AsRef<Path>) -> Result<BTreeMap<String, Self>, DataError> {
        let folder = folder.as_ref();
        let path = folder.join(SPLITS);
        let open = |name: String| {
            let dataset = Self::load_from_disk(inside(folder, &name, &path)?)?;
            Ok((name, dataset))
        };
        splits(folder)?.into_iter().map(open).collect()
    }
}

/// The names of a folder's splits.
fn splits(folder: &Path) -> Result<Vec<String>, DataError> {
    let path = folder.join(SPLITS);
    let content = json(&path)?;
    let names = content["splits"].as_array();
    let names = names.and_then(|names| names.iter().map(|name| name.as_str().map(str::to_owned)).collect());
    names.ok_or_else(|| DataError::layout(&path, "`splits`, a list of names", shortened(&content)))
}

fn json(path: &Path) -> Result<Value, DataError> {
    let content = read_file(path, None, MAX_JSON_BYTES)?;
    serde_json::from_slice(&content).map_err(|error| DataError::layout(path, "JSON", error.to_string()))
}

/// The path of a file or folder in `folder`.
fn inside(folder: &Path, name: &str, listed_in: &Path) -> Result<PathBuf, DataError> {
    let mut parts = Path::new(name).components();
    match (parts.next(), parts.next()) {
        (Some(Component::Normal(part)), None) if part == name => Ok(folder.join(name)),
        _ => {
            let found: String = name.chars().take(SHOWN).collect();
            Err(DataError::layout(listed_in, "names of files in this folder", format!("{found:?}")))
        }
    }
}

fn shortened(value: &Value) -> String {
    value.to_string().chars().take(SHOWN).collect()
}
