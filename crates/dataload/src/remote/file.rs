//! A remote file that is read like a local one.

use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::object::Object;
use super::store::runtime;
use super::version::Version;
use super::{CHUNK, url};
use crate::DataError;

/// A place in a remote file.
pub(crate) struct RemoteFile {
    object: Arc<Object>,
    at: u64,
    /// The chunk that was read last from here, to tell a reader that goes from front to back.
    last: Option<u64>,
}

impl RemoteFile {
    pub(crate) fn open(path: &Path) -> Result<Self, DataError> {
        Ok(Self { object: Object::open(url(path)?)?, at: 0, last: None })
    }

    /// Opens a file of which a version is known, without a question to the server.
    pub(crate) fn open_version(path: &Path, version: &Version) -> Result<Self, DataError> {
        Ok(Self { object: Object::open_version(url(path)?, version)?, at: 0, last: None })
    }

    pub(crate) fn len(&self) -> u64 {
        self.object.version.size
    }

    pub(crate) fn version(&self) -> &Version {
        &self.object.version
    }

    /// Fills `buffer` with the bytes at `offset`.
    #[cfg(any(feature = "csv", feature = "jsonl", feature = "parquet"))]
    pub(crate) fn read_exact_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.object.read_at(offset, buffer)
    }
}

impl Read for RemoteFile {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        // Up to the end of a chunk: the next one may not be here yet.
        let left = self.len().saturating_sub(self.at).min(CHUNK - self.at % CHUNK);
        let count = left.min(buffer.len() as u64) as usize;
        let chunk = self.at / CHUNK;
        if count > 0 && self.last.replace(chunk).is_none_or(|last| last + 1 == chunk || last == chunk) {
            self.object.ask_from(chunk);
        }
        self.object.read_at(self.at, &mut buffer[..count])?;
        self.at += count as u64;
        Ok(count)
    }
}

impl Seek for RemoteFile {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
            SeekFrom::End(by) => self.len().checked_add_signed(by),
        };
        self.at = at.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}

/// Fetches the beginning of a file, without waiting for it. Errors show when it is read.
pub(crate) fn read_ahead(path: &Path) {
    let (path, Ok(runtime)) = (PathBuf::from(path), runtime()) else { return };
    runtime.spawn_blocking(move || {
        let Ok(file) = RemoteFile::open(&path) else { return };
        if file.len() == 0 {
            return;
        }
        file.object.ask_from(0);
        // The file is open until the first chunk is here; then its reader has opened it, or the rest can wait.
        let _ = file.object.wait_for(0);
    });
}
