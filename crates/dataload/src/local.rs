//! Files that are mapped into memory: those of this machine, and copies of those elsewhere.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use overdrive_ffi::MappedFile;

use crate::DataError;
#[cfg(not(feature = "remote"))]
use crate::read::no_remote;
use crate::read::{is_url, open_regular};
#[cfg(feature = "remote")]
use crate::remote::fetch_whole as fetch;

/// A file that is here as a whole. It must be read by offset or mapped: its position is shared.
// Only LMDB needs more than the file.
#[cfg_attr(not(feature = "lmdb"), allow(dead_code))]
pub(crate) struct LocalFile {
    pub(crate) file: File,
    pub(crate) bytes: u64,
    /// A name by which it can be opened again, as long as `file` lives.
    pub(crate) name: PathBuf,
    /// The time of the last change in nanoseconds since 1970; of a file elsewhere another number, by its version.
    pub(crate) state: u64,
}

impl LocalFile {
    /// Opens a file; one elsewhere is fetched whole into the cache first, which takes as long as it takes.
    pub(crate) fn open(path: &Path) -> Result<Self, DataError> {
        if is_url(path) {
            return fetch(path);
        }
        let (file, bytes) = open_regular(path)?;
        let metadata = file.metadata().map_err(DataError::io(path))?;
        let modified = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let state = modified.map_or(0, |since| since.as_nanos() as u64);
        Ok(Self { file, bytes, name: path.to_owned(), state })
    }
}

#[cfg(not(feature = "remote"))]
fn fetch(path: &Path) -> Result<LocalFile, DataError> {
    Err(no_remote(path))
}

/// Maps a file of this machine or elsewhere.
pub(crate) fn map(path: &Path) -> Result<MappedFile, DataError> {
    MappedFile::new(&LocalFile::open(path)?.file).map_err(DataError::io(path))
}
