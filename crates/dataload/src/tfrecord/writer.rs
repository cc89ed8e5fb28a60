//! Writes records with their checksums.

use std::io::Write;
use std::path::{Path, PathBuf};

use super::Example;
use super::crc::masked_crc;
use crate::DataError;
use crate::output::Output;

/// Writes a TFRecord file, which appears at its path once it is complete.
///
/// A path that ends in `.gz` is compressed with gzip, in `.zst` with zstd (which TensorFlow does not read).
///
/// # Source
/// `tf.io.TFRecordWriter`.
pub struct TfRecordWriter {
    output: Output,
}

impl TfRecordWriter {
    /// Starts a file; an existing one at this path stays until [`finish`](Self::finish).
    ///
    /// # Errors
    /// [`DataError::Io`].
    pub fn create(path: impl AsRef<Path>) -> Result<Self, DataError> {
        Ok(Self { output: Output::create(path.as_ref())? })
    }

    /// Adds a record.
    ///
    /// # Errors
    /// [`DataError::Io`].
    pub fn write(&mut self, record: &[u8]) -> Result<(), DataError> {
        let length = (record.len() as u64).to_le_bytes();
        let pieces = [&length, &masked_crc(&length).to_le_bytes()[..], record, &masked_crc(record).to_le_bytes()];
        let written = pieces.into_iter().try_for_each(|piece| self.output.write_all(piece));
        written.map_err(|error| DataError::Io { path: self.output.path().to_owned(), error })
    }

    /// Adds an example.
    ///
    /// # Errors
    /// [`DataError::Io`].
    pub fn write_example(&mut self, example: &Example<'_>) -> Result<(), DataError> {
        self.write(&example.encode())
    }

    /// Completes the file and returns its path.
    ///
    /// # Errors
    /// [`DataError::Io`].
    pub fn finish(self) -> Result<PathBuf, DataError> {
        self.output.finish()
    }
}
