//! The errors of loading, from file to batch.

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Why a sample or a batch could not be loaded.
///
/// Every message is complete in itself (file, offset, what was expected and what was found), so that printing the
/// error alone is enough.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The operating system could not open or read a file or folder.
    #[error("{}: {error}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The operating system's error.
        error: io::Error,
    },

    /// A remote file could not be fetched, also not on further tries. It is no bad sample, so it ends the epoch under every
    /// [`OnError`](crate::OnError).
    #[error("{}: {error}", url.display())]
    Remote {
        /// The file.
        url: PathBuf,
        /// What the server or the network says.
        error: io::Error,
    },

    /// A file's content contradicts its format, its header or its length.
    #[error("{}: at byte {offset}: expected {expected}, found {found}", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The offset in bytes; for a compressed file, in the decompressed content.
        offset: u64,
        /// What was expected there.
        expected: String,
        /// What was found there.
        found: String,
    },

    /// A line of a text file that is not what it should be.
    #[error("{}: line {line}: {problem}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line's number, from 1; that of the first line of a record with several.
        line: u64,
        /// What was expected there, and what was found.
        problem: String,
    },

    /// An entry of a database that differs from what was written, or is gone.
    #[error("{}: entry \"{key}\": expected {expected}, found {found}", path.display())]
    CorruptEntry {
        /// The database's file.
        path: PathBuf,
        /// The entry's key, with what is not printable escaped.
        key: String,
        /// What was expected there.
        expected: String,
        /// What was found there.
        found: String,
    },

    /// An image file of a format that this build cannot decode.
    #[error("{}: unknown image format, the file starts with {magic:02x?}", path.display())]
    UnknownFormat {
        /// The file.
        path: PathBuf,
        /// Its first bytes, at most eight.
        magic: Vec<u8>,
    },

    /// A file or image larger than the reader accepts.
    #[error("{}: {what} takes {bytes} bytes, at most {limit} are accepted", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// What is too large.
        what: &'static str,
        /// Its size in bytes.
        bytes: u64,
        /// The limit in bytes.
        limit: u64,
    },

    /// A folder or set of files without the layout that the dataset needs.
    #[error("{}: expected {expected}, found {found}", path.display())]
    Layout {
        /// The folder or file.
        path: PathBuf,
        /// What the dataset needs.
        expected: String,
        /// What was found there.
        found: String,
    },

    /// The number of an image's bytes does not match its shape.
    #[error("{bytes} bytes do not match an image of shape [{height}, {width}, {channels}]")]
    ImageShape {
        /// Rows.
        height: usize,
        /// Columns.
        width: usize,
        /// Channels.
        channels: usize,
        /// The length of the given data.
        bytes: usize,
    },

    /// A sampler or caller asked for a sample that the dataset does not have.
    #[error("index {index} is out of range for a dataset of {len} samples")]
    IndexOutOfRange {
        /// The index asked for.
        index: usize,
        /// The dataset's length.
        len: usize,
    },

    /// A batch without samples cannot be collated.
    #[error("a batch without samples cannot be collated")]
    EmptyBatch,

    /// A sample that cannot be stacked with the others of its batch.
    #[error(
        "shape mismatch at position {position} of the batch: expected {expected:?}, found {found:?}: resize or pad samples \
         to one shape"
    )]
    ShapeMismatch {
        /// The sample's position in its batch.
        position: usize,
        /// The shape of the batch's other samples.
        expected: Vec<usize>,
        /// This sample's shape.
        found: Vec<usize>,
        /// The positions of other samples that do not fit either, where they are known.
        others: Vec<usize>,
    },

    /// A sample that does not fit the others of its batch, for a reason other than its shape.
    #[error("position {position} of the batch: expected {expected}, found {found}")]
    Misfit {
        /// The sample's position in its batch.
        position: usize,
        /// What would fit.
        expected: String,
        /// What the sample is.
        found: String,
        /// The positions of other samples that do not fit either.
        others: Vec<usize>,
    },

    /// Something went wrong with one sample; the loader adds the index.
    #[error("sample {index}{}: {error}", in_brackets(key, error))]
    Sample {
        /// The sample's index in the dataset.
        index: usize,
        /// The dataset's name for it, see [`Dataset::key`](crate::Dataset::key).
        key: Option<String>,
        /// What went wrong.
        error: Box<DataError>,
    },

    /// Something went wrong with one item of a stream.
    #[error("shard {shard}, item {position}{}: {error}", in_brackets(key, error))]
    StreamItem {
        /// The shard's number.
        shard: usize,
        /// The item's position in the shard, from 0.
        position: u64,
        /// The shard's file or other name, and the format's name for the item, where they exist; see
        /// [`IterableDataset::shard_name`](crate::IterableDataset::shard_name) and [`Deferred`](crate::Deferred).
        key: Option<String>,
        /// What went wrong.
        error: Box<DataError>,
    },

    /// User code panicked while it handled one sample.
    #[error("sample {index}{}: panicked: {message}", in_brackets(key, ""))]
    WorkerPanicked {
        /// The index that was being loaded.
        index: usize,
        /// The dataset's name for it.
        key: Option<String>,
        /// The panic's message.
        message: String,
    },

    /// `Collate::collate` panicked.
    #[error("batch {batch}: collate panicked: {message}")]
    CollatePanicked {
        /// The batch's number in its epoch.
        batch: usize,
        /// The panic's message.
        message: String,
    },

    /// A stream panicked while it was read; the loader adds the batch's number.
    #[error("batch {batch}: the stream panicked: {message}")]
    StreamPanicked {
        /// The number of the batch that was being read.
        batch: usize,
        /// The panic's message.
        message: String,
    },

    /// A worker panicked outside of any sample or batch, for example in the user's `Dataset::key`.
    #[error("a worker panicked: {message}")]
    WorkerDied {
        /// The panic's message, or what the worker was doing.
        message: String,
    },

    /// A stream with `batches_per_epoch` had no good samples for another batch.
    #[error("the stream has no samples for batch {batch} of {batches}: expected shards with samples for this rank")]
    StreamEnded {
        /// The batch that was due.
        batch: usize,
        /// How many batches were asked for.
        batches: usize,
    },

    /// `worker_init_fn` failed or panicked.
    #[error("worker {worker}: worker_init_fn failed: {error}")]
    WorkerInit {
        /// The worker's number, from 0.
        worker: usize,
        /// What went wrong.
        error: Box<DataError>,
    },

    /// No batch arrived within [`DataLoaderBuilder::timeout`](crate::DataLoaderBuilder::timeout).
    #[error("batch {batch} did not arrive within {timeout:?}")]
    Timeout {
        /// The batch that was due.
        batch: usize,
        /// How long the loader waited.
        timeout: Duration,
    },

    /// The epoch was dropped while it was loading. Collate functions and streams return this error; the training loop
    /// never gets it.
    #[error("the epoch was dropped")]
    Cancelled,

    /// A worker thread could not be started.
    #[error("worker {worker} of {of} could not be started: {error}")]
    Spawn {
        /// The worker's number, from 0.
        worker: usize,
        /// How many workers were asked for.
        of: usize,
        /// The operating system's error.
        error: io::Error,
    },

    /// Every worker ended although batches were still due.
    #[error("every worker ended before batch {batch} was delivered")]
    WorkersGone {
        /// The batch that cannot be delivered.
        batch: usize,
    },

    /// An option that is out of range, or two options that exclude each other.
    #[error("{option}: expected {expected}, found {found}")]
    InvalidOption {
        /// The option.
        option: &'static str,
        /// What is accepted.
        expected: String,
        /// What was given.
        found: String,
    },

    /// libtorch refused a tensor operation.
    #[error("libtorch: {}", without_frames(.0))]
    Tensor(tch::TchError),

    /// libtorch refused an operation, or a device is not available.
    #[error(transparent)]
    Torch(#[from] overdrive_ffi::Error),

    /// An error of the user's own dataset or collate function; see [`DataError::other`].
    #[error(transparent)]
    Other(Box<dyn Error + Send + Sync>),
}

/// libtorch's message without the C++ stack trace that follows it.
fn without_frames(error: &tch::TchError) -> String {
    let text = match error {
        tch::TchError::Torch(text) => text.clone(),
        other => other.to_string(),
    };
    text.split("\nException raised from").next().unwrap_or_default().to_owned()
}

impl From<tch::TchError> for DataError {
    /// So that `?` works on tch's fallible operations in a collate function.
    fn from(error: tch::TchError) -> Self {
        Self::Tensor(error)
    }
}

impl DataError {
    /// Wraps any error, or a plain message, for use in your own [`Dataset`](crate::Dataset) or
    /// [`Collate`](crate::Collate).
    pub fn other(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Other(error.into())
    }

    /// The error without the [`Sample`](Self::Sample) or [`StreamItem`](Self::StreamItem) that the loader wrapped
    /// around it.
    pub fn innermost(&self) -> &DataError {
        match self {
            Self::Sample { error, .. } | Self::StreamItem { error, .. } => error.innermost(),
            error => error,
        }
    }

    /// The name of the sample or item that the error belongs to, where its dataset has one.
    pub fn key(&self) -> Option<&str> {
        match self {
            Self::Sample { key, .. } | Self::StreamItem { key, .. } | Self::WorkerPanicked { key, .. } => {
                key.as_deref()
            }
            _ => None,
        }
    }

    /// The dataset index that the error belongs to, where it belongs to one sample.
    pub fn index(&self) -> Option<usize> {
        match self {
            Self::Sample { index, .. } | Self::WorkerPanicked { index, .. } | Self::IndexOutOfRange { index, .. } => {
                Some(*index)
            }
            _ => None,
        }
    }

    /// Whether it ends an epoch under every policy: it says nothing about a sample.
    pub(crate) fn ends_epoch(&self) -> bool {
        matches!(self.innermost(), Self::Remote { .. })
    }

    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |error| match crate::read::NotFetched::is(&error) {
            true => Self::Remote { url: path.to_owned(), error },
            false => Self::Io { path: path.to_owned(), error },
        }
    }

    pub(crate) fn corrupt(path: &Path, offset: u64, expected: impl Into<String>, found: impl Into<String>) -> Self {
        Self::Corrupt { path: path.to_owned(), offset, expected: expected.into(), found: found.into() }
    }

    pub(crate) fn layout(path: &Path, expected: impl Into<String>, found: impl Into<String>) -> Self {
        Self::Layout { path: path.to_owned(), expected: expected.into(), found: found.into() }
    }

    pub(crate) fn option(option: &'static str, expected: impl Into<String>, found: impl ToString) -> Self {
        Self::InvalidOption { option, expected: expected.into(), found: found.to_string() }
    }
}

/// The names in brackets, without a file name that `message` already begins with.
fn in_brackets(key: &Option<String>, message: impl ToString) -> String {
    let message = message.to_string();
    let file = message.split(": ").next().unwrap_or_default();
    let names = key.iter().flat_map(|key| key.split(", "));
    let names: Vec<&str> = names.filter(|name| !Path::new(file).ends_with(name)).collect();
    if names.is_empty() { String::new() } else { format!(" ({})", names.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_names_a_file_once() {
        let error = || Box::new(DataError::UnknownFormat { path: "train/cat/5.jpg".into(), magic: vec![1] });
        let said = |key: &str| DataError::Sample { index: 5, key: Some(key.to_owned()), error: error() }.to_string();
        let rest = "train/cat/5.jpg: unknown image format, the file starts with [01]";
        assert_eq!(said("cat/5.jpg"), format!("sample 5: {rest}"));
        assert_eq!(said("train/cat/5.jpg"), format!("sample 5: {rest}"));
        assert_eq!(said("5"), format!("sample 5 (5): {rest}"), "another name");
        let shard = |key: &str| {
            DataError::StreamItem { shard: 0, position: 7, key: Some(key.to_owned()), error: error() }.to_string()
        };
        assert_eq!(shard("train/cat/5.jpg, label 7"), format!("shard 0, item 7 (label 7): {rest}"));
        let panicked = DataError::WorkerPanicked { index: 5, key: Some("5.jpg".into()), message: "torn".into() };
        assert_eq!(panicked.to_string(), "sample 5 (5.jpg): panicked: torn");
    }
}
