//! A file that many threads read at once, each at its own offset.

use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::DataError;
use crate::read::{Input, Version};

/// A file, which is open only while it is read: a dataset may have more files than a process may have open.
#[derive(Clone)]
pub(super) struct ClosedFile {
    path: Arc<Path>,
    /// Its content, where that is in memory.
    memory: Option<Arc<Vec<u8>>>,
    bytes: u64,
    /// Where it is elsewhere: the footer is of this version.
    version: Option<Version>,
}

/// A file read by offset only. The `parquet` crate's file reader shares one position between all threads, so a thread
/// may get the bytes that another asked for.
pub(super) struct OpenFile {
    source: ClosedFile,
    /// `None` where the content is in memory.
    file: Option<Input>,
}

impl ClosedFile {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the file again.
    pub(super) fn open(&self) -> Result<OpenFile, DataError> {
        if self.memory.is_some() {
            return Ok(OpenFile { source: self.clone(), file: None });
        }
        let (file, bytes) = Input::open_version(&self.path, self.version.as_ref())?;
        if bytes != self.bytes {
            let expected = format!("the {} bytes that it had when the dataset was opened", self.bytes);
            return Err(DataError::layout(&self.path, expected, format!("{bytes} bytes")));
        }
        Ok(OpenFile { source: self.clone(), file: Some(file) })
    }
}

impl OpenFile {
    pub(super) fn new(path: Arc<Path>) -> Result<Self, DataError> {
        let (file, bytes) = Input::open(&path)?;
        let version = file.version();
        Ok(Self { source: ClosedFile { path, memory: None, bytes, version }, file: Some(file) })
    }

    pub(super) fn from_bytes(bytes: Vec<u8>, path: &Path) -> Self {
        let length = bytes.len() as u64;
        let source = ClosedFile { path: path.into(), memory: Some(Arc::new(bytes)), bytes: length, version: None };
        Self { source, file: None }
    }

    /// The file, closed.
    pub(super) fn close(self) -> ClosedFile {
        self.source
    }

    pub(super) fn path(&self) -> &Path {
        &self.source.path
    }

    /// The file's length in bytes.
    pub(super) fn len(&self) -> u64 {
        self.source.bytes
    }

    /// Fills `buffer` with the bytes at `offset`.
    pub(super) fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DataError> {
        let outcome = match &self.file {
            Some(file) => file.read_exact_at(offset, buffer),
            None => {
                let start = usize::try_from(offset).unwrap_or(usize::MAX);
                let content = self.source.memory.as_ref().and_then(|bytes| bytes.get(start..));
                let found = content.and_then(|bytes| bytes.get(..buffer.len()));
                found.map(|found| buffer.copy_from_slice(found)).ok_or(io::ErrorKind::UnexpectedEof.into())
            }
        };
        outcome.map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                let expected = format!("{} bytes", buffer.len());
                let found = format!("the end of the file at byte {}", self.source.bytes);
                DataError::corrupt(self.path(), offset, expected, found)
            }
            _ => DataError::io(self.path())(error),
        })
    }
}
