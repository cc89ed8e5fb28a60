//! Writes a target in a temporary place until it is complete.

mod arrow;
mod columns;
mod folder;
mod hugging_face;
mod lmdb;
mod mds;
mod parquet;
mod staged;
mod text;
mod tfrecord;
mod tokens;
mod webdataset;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::{fs, io};

use anyhow::{Context, Result, ensure};
use overdrive_dataload::DataError;
use tempfile::TempDir;

use crate::cli::ConvertOptions;
use crate::format::{Format, is_url};
use crate::sample::Sample;

/// Takes samples; a target that is dropped before `finish` leaves nothing behind.
pub trait Target {
    fn write(&mut self, sample: Sample) -> Result<(), Refused>;

    /// Moves everything to its final name.
    fn finish(self: Box<Self>) -> Result<()>;
}

/// Why a sample was not written.
pub enum Refused {
    /// This sample does not fit the format; others may.
    Sample(anyhow::Error),
    /// No further sample can be written either.
    All(anyhow::Error),
}

impl From<DataError> for Refused {
    fn from(error: DataError) -> Self {
        match error {
            DataError::InvalidOption { .. } => Self::Sample(error.into()),
            error => Self::All(error.into()),
        }
    }
}

/// Refuses a URL, and what is there already.
pub fn check(path: &Path) -> Result<()> {
    ensure!(
        !is_url(path),
        "{}: a target is a path of this machine, not a URL: convert to one, and copy it with the store's own program",
        path.display()
    );
    refuse_existing(path)
}

/// Starts the target, which was [checked](check).
pub fn create(options: &ConvertOptions, format: Format) -> Result<Box<dyn Target>> {
    let path = &*options.dst;
    let parent = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let name = path.file_name().with_context(|| format!("{} has no name", path.display()))?;
    fs::create_dir_all(parent).with_context(|| format!("cannot create the folder {}", parent.display()))?;
    match format {
        Format::Folder => Ok(Box::new(folder::Folder::create(path, staging_folder(parent, name)?))),
        Format::WebDataset => Ok(Box::new(webdataset::Shards::create(options, parent, name)?)),
        Format::TfRecord => Ok(Box::new(tfrecord::Shards::create(options, parent, name)?)),
        Format::Lmdb => Ok(Box::new(lmdb::Database::create(options)?)),
        Format::Arrow => Ok(Box::new(arrow::create(options))),
        Format::HuggingFace => Ok(Box::new(hugging_face::create(options, parent, name)?)),
        Format::Parquet => Ok(Box::new(parquet::create(options))),
        Format::Jsonl => Ok(Box::new(text::JsonLines::create(path)?)),
        Format::Csv => Ok(Box::new(text::create_table(options))),
        Format::Mds => Ok(Box::new(mds::create(options, parent, name)?)),
        Format::Megatron | Format::Tokens => Ok(Box::new(tokens::Tokens::create(options, format)?)),
    }
}

/// Files that are there stay.
fn refuse_existing(path: &Path) -> Result<()> {
    let exists = path.symlink_metadata().is_ok();
    ensure!(!exists, "{} already exists: remove it, or choose another name", path.display());
    Ok(())
}

/// A hidden folder next to the target, which is deleted on drop.
fn staging_folder(parent: &Path, name: &OsStr) -> Result<TempDir> {
    let prefix = format!(".{}.", name.to_string_lossy());
    let made = tempfile::Builder::new().prefix(&prefix).suffix(".part").tempdir_in(parent);
    made.with_context(|| format!("cannot write in {}", parent.display()))
}

/// Moves a complete folder to its final name.
fn move_folder(staging: TempDir, path: &Path) -> Result<()> {
    make_readable(staging.path(), 0o755).with_context(|| format!("cannot write {}", staging.path().display()))?;
    fs::rename(staging.path(), path).with_context(|| format!("cannot create {}", path.display()))?;
    // It was renamed: nothing to delete.
    _ = staging.keep();
    Ok(())
}

/// Temporary files and folders are for their owner alone.
#[cfg(unix)]
fn make_readable(path: &Path, mode: u32) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}

#[cfg(not(unix))]
fn make_readable(_: &Path, _: u32) -> io::Result<()> {
    Ok(())
}

/// The same files, and the indexes that were written beside them.
fn with_indexes(files: impl Iterator<Item = (PathBuf, PathBuf)>) -> Vec<(PathBuf, PathBuf)> {
    let index = |path: &Path| {
        let mut path = path.as_os_str().to_owned();
        path.push(".idx");
        PathBuf::from(path)
    };
    let with_index = |(from, to): (PathBuf, PathBuf)| {
        let index = (index(&from), index(&to));
        let index = index.0.is_file().then_some(index);
        [Some((from, to)), index].into_iter().flatten()
    };
    files.flat_map(with_index).collect()
}

/// Moves files from the first path of each pair to the second: all of them, or none.
fn move_all(files: &[(PathBuf, PathBuf)]) -> Result<()> {
    files.iter().try_for_each(|(_, to)| refuse_existing(to))?;
    for (done, (from, to)) in files.iter().enumerate() {
        if let Err(error) = fs::rename(from, to) {
            files[..done].iter().for_each(|(_, to)| _ = fs::remove_file(to));
            return Err(error).with_context(|| format!("cannot create {}", to.display()));
        }
    }
    Ok(())
}
