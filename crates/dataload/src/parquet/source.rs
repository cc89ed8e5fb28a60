//! A file that many threads read at once, each at its own offset.

use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::DataError;
use crate::read::Input;

/// A file read by offset only. The `parquet` crate's file reader shares one position between all threads, so a thread
/// may get the bytes that another asked for.
pub(super) struct Source {
    path: Arc<Path>,
    data: Data,
    bytes: u64,
}

enum Data {
    Input(Input),
    Memory(Vec<u8>),
}

impl Source {
    pub(super) fn open(path: Arc<Path>) -> Result<Self, DataError> {
        let (input, bytes) = Input::open(&path)?;
        Ok(Self { path, data: Data::Input(input), bytes })
    }

    pub(super) fn from_bytes(bytes: Vec<u8>, path: &Path) -> Self {
        Self { path: path.into(), bytes: bytes.len() as u64, data: Data::Memory(bytes) }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The file's length in bytes.
    pub(super) fn len(&self) -> u64 {
        self.bytes
    }

    /// Fills `buffer` with the bytes at `offset`.
    pub(super) fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<(), DataError> {
        let outcome = match &self.data {
            Data::Input(input) => input.read_exact_at(offset, buffer),
            Data::Memory(bytes) => {
                let start = usize::try_from(offset).unwrap_or(usize::MAX);
                let found = bytes.get(start..).and_then(|bytes| bytes.get(..buffer.len()));
                found.map(|found| buffer.copy_from_slice(found)).ok_or(io::ErrorKind::UnexpectedEof.into())
            }
        };
        outcome.map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                let expected = format!("{} bytes", buffer.len());
                DataError::corrupt(&self.path, offset, expected, format!("the end of the file at byte {}", self.bytes))
            }
            _ => DataError::Io { path: self.path.to_path_buf(), error },
        })
    }
}
