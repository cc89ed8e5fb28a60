//! Writes records with their checksums.

use std::io::Write;
use std::path::{Path, PathBuf};

use super::crc::masked_crc;
use super::{Example, index};
use crate::DataError;
use crate::output::Output;
use crate::shards::index as shard_index;

/// Writes a TFRecord file, which appears at its path once it is complete.
///
/// A path that ends in `.gz` is compressed with gzip, in `.zst` with zstd (which TensorFlow does not read).
///
/// # Source
/// `tf.io.TFRecordWriter`.
pub struct TfRecordWriter {
    output: Output,
    /// The text of the index, if there is to be one.
    index: Option<String>,
}

impl TfRecordWriter {
    /// Starts a file; an existing one at this path stays until [`finish`](Self::finish).
    ///
    /// # Errors
    /// [`DataError::Io`].
    pub fn create(path: impl AsRef<Path>) -> Result<Self, DataError> {
        Ok(Self { output: Output::create(path.as_ref())?, index: None })
    }

    /// As [`create`](Self::create), with an index beside the file, see
    /// [`TfRecordDataset::write_index`](super::TfRecordDataset::write_index).
    ///
    /// # Errors
    /// [`DataError::Io`]; [`DataError::Layout`] for a path in `.gz`, since such a file cannot be read in the middle.
    pub fn with_index(path: impl AsRef<Path>) -> Result<Self, DataError> {
        shard_index::require_seekable(path.as_ref())?;
        Ok(Self { index: Some(String::new()), ..Self::create(path)? })
    }

    /// Adds a record.
    ///
    /// # Errors
    /// [`DataError::Io`].
    pub fn write(&mut self, record: &[u8]) -> Result<(), DataError> {
        let length = (record.len() as u64).to_le_bytes();
        let pieces = [&length, &masked_crc(&length).to_le_bytes()[..], record, &masked_crc(record).to_le_bytes()];
        let written = pieces.into_iter().try_for_each(|piece| self.output.write_all(piece));
        written.map_err(|error| DataError::Io { path: self.output.path().to_owned(), error })?;
        if let Some(index) = &mut self.index {
            let bytes = pieces.iter().map(|piece| piece.len() as u64).sum::<u64>();
            index::add(index, self.output.written() - bytes, bytes);
        }
        Ok(())
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
        let path = self.output.finish()?;
        self.index.map_or(Ok(()), |index| shard_index::write(&path, &index))?;
        Ok(path)
    }
}
