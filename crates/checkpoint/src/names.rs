//! Names of parts, which become file names, and of folders.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::error::CheckpointError;

const RANK: &str = "rank-";

/// The folder of a rank's own checkpoints in that of the run.
pub(crate) fn rank_folder(root: &Path, rank: usize) -> PathBuf {
    root.join(format!("{RANK}{rank}"))
}

/// The rank whose folder has this name.
pub(crate) fn rank_of(folder: &str) -> Option<usize> {
    let number = folder.strip_prefix(RANK)?;
    // `rank-07` is not the folder of rank 7.
    number.parse().ok().filter(|rank: &usize| rank.to_string() == number)
}

/// The file with a part's tensors in the folder of a checkpoint.
pub(crate) fn tensors_file(folder: &Path, part: &str) -> PathBuf {
    folder.join(format!("{part}.safetensors"))
}

/// Accepts only names that are valid file names on every system and cannot lead out of the folder; else returns what is
/// expected.
pub(crate) fn check_name(name: &str) -> Result<(), &'static str> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    let fits = (1..=100).contains(&name.len()) && name.bytes().all(plain) && !name.starts_with('.');
    if fits { Ok(()) } else { Err("1 to 100 letters, digits, `_`, `-` and `.`, not starting with `.`") }
}

/// Checks the names of a checkpoint's parts.
pub(crate) fn check_names<'a>(names: impl Iterator<Item = &'a str>) -> Result<(), CheckpointError> {
    let mut seen = BTreeSet::new();
    for name in names {
        let once = match seen.insert(name.to_ascii_lowercase()) {
            true => Ok(()),
            false => Err("a name that no other part has, ignoring case"),
        };
        check_name(name).and(once).map_err(|expected| CheckpointError::PartName { name: name.to_owned(), expected })?;
    }
    Ok(())
}
