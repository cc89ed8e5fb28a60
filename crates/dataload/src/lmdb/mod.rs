//! LMDB: key-value entries in a memory-mapped tree, a common format for images among PyTorch users.

mod builder;
mod checksums;
mod index;
mod keys;
mod pages;
mod sample;
mod walk;
mod writer;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ::lmdb::{Database, Environment, Error, Transaction};

pub use builder::LmdbDatasetBuilder;
pub use sample::LmdbSample;
pub use writer::{LmdbWriter, LmdbWriterBuilder};

use self::checksums::Checksums;
use self::keys::Keys;
use crate::{DataError, Dataset};

/// The entries of an LMDB database, in the order of their keys; read by any number of threads at once.
///
/// ```no_run
/// use overdrive_dataload::{DataLoader, Dataset, LmdbDataset};
///
/// let dataset = LmdbDataset::builder("train.mdb").index_file("train.mdb.index").open()?;
/// // Many writers store the number of entries under an extra key: select the images.
/// let images: Vec<usize> = (0..dataset.len()).filter(|&i| dataset.key_bytes(i) != Some(b"__len__")).collect();
/// let images = dataset.subset(images)?.map(|sample| Ok(sample.into_value()));
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// # Damage
/// LMDB follows the file's page numbers through a memory map without checking them. Opening therefore compares the
/// file's length with its last page, and reads the whole tree with plain reads, checking every number: a damaged tree
/// is an error when the database is opened, not a crash later. These risks remain:
///
/// - a value whose bytes have changed, or an intact older state of the database, goes unnoticed, since LMDB has no
///   checksums. Databases that [`LmdbWriter`] wrote with [`checksums`](LmdbWriterBuilder::checksums) have one per
///   value, and every value that is read is compared with it;
/// - a file that is written to or truncated while it is open can give wrong values or kill the process (SIGBUS).
///   Nothing is locked, so that read-only disks work: do not write to a database that is in use;
/// - an [`index_file`](LmdbDatasetBuilder::index_file) replaces the check of the tree for as long as the file's length,
///   modification time and last transaction are the same; damage that changes none of them is not noticed.
///
/// A URL is that of the file or of the folder. It is fetched whole into the cache when it is opened, and mapped there; the
/// folder is known by its `data.mdb`.
///
/// # Source
/// Python's `lmdb.open(path, readonly=True, lock=False)` in a `torch.utils.data.Dataset`.
pub struct LmdbDataset {
    environment: Environment,
    database: Database,
    path: Arc<Path>,
    keys: Arc<Keys>,
    checksums: Option<Checksums>,
}

impl LmdbDataset {
    /// Opens the database of a file, or of a folder with a `data.mdb`, and lists its keys.
    ///
    /// # Errors
    /// As [`LmdbDatasetBuilder::open`].
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, DataError> {
        Self::builder(path).open()
    }

    /// Options for the database of a file, or of a folder with a `data.mdb`.
    pub fn builder(path: impl Into<PathBuf>) -> LmdbDatasetBuilder {
        LmdbDatasetBuilder::new(path.into())
    }

    /// The key of an entry.
    pub fn key_bytes(&self, index: usize) -> Option<&[u8]> {
        self.keys.get(index)
    }

    /// Every key, in order.
    pub fn keys(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        self.keys.iter()
    }

    /// The index of the entry with this key; [`subset`](Dataset::subset) takes such indices in any order.
    pub fn index_of(&self, key: &[u8]) -> Option<usize> {
        self.keys.find(key)
    }

    /// Whether values are compared with checksums.
    pub fn has_checksums(&self) -> bool {
        self.checksums.is_some()
    }

    /// Passes the value of an entry to `read` straight from the file's memory map, without a copy.
    ///
    /// # Errors
    /// As [`get`](Dataset::get).
    pub fn with_value<T>(&self, index: usize, read: impl FnOnce(&[u8]) -> T) -> Result<T, DataError> {
        let key = self.keys.get(index).ok_or(DataError::IndexOutOfRange { index, len: self.keys.len() })?;
        let transaction = self.environment.begin_ro_txn().map_err(refused(&self.path))?;
        let value = match transaction.get(self.database, &key) {
            Ok(value) => value,
            Err(Error::NotFound) => return Err(self.corrupt(key, "a value", "none: the file has changed".to_owned())),
            Err(error) => return Err(refused(&self.path)(error)),
        };
        if let Some(expected) = self.checksums.as_ref().and_then(|checksums| checksums.get(index)) {
            let found = checksums::of(key, value);
            if found != expected {
                return Err(self.corrupt(
                    key,
                    &format!("a value with the checksum {expected:08x}"),
                    format!("{found:08x}"),
                ));
            }
        }
        Ok(read(value))
    }

    fn corrupt(&self, key: &[u8], expected: &str, found: String) -> DataError {
        let (path, key) = (self.path.to_path_buf(), key.escape_ascii().to_string());
        DataError::CorruptEntry { path, key, expected: expected.to_owned(), found }
    }
}

impl Dataset for LmdbDataset {
    type Sample = LmdbSample;

    fn len(&self) -> usize {
        self.keys.len()
    }

    /// Copies the value out of the file.
    ///
    /// # Errors
    /// [`DataError::CorruptEntry`] with the key, when the value does not match its checksum or is gone;
    /// [`DataError::IndexOutOfRange`]; [`DataError::Io`] with LMDB's error.
    fn get(&self, index: usize) -> Result<LmdbSample, DataError> {
        let value = self.with_value(index, <[u8]>::to_vec)?;
        Ok(LmdbSample { keys: self.keys.clone(), index, value })
    }

    /// The entry's key, with bytes that are not printable ASCII escaped.
    fn key(&self, index: usize) -> Option<String> {
        self.key_bytes(index).map(|key| key.escape_ascii().to_string())
    }
}

impl fmt::Debug for LmdbDataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LmdbDataset {{ path: {:?}, entries: {} }}", self.path, self.keys.len())
    }
}

/// LMDB's error, with the file's path.
fn refused(path: &Path) -> impl Fn(Error) -> DataError {
    move |error| {
        let error = match error {
            Error::Other(code) => std::io::Error::from_raw_os_error(code),
            error => std::io::Error::other(error),
        };
        DataError::Io { path: path.to_owned(), error }
    }
}
