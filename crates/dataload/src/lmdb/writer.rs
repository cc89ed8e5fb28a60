//! Writes a database under a temporary name, and renames it when it is complete.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use ::lmdb::{Database, Environment, EnvironmentFlags, Error, Transaction, WriteFlags};

use super::builder::DATA_FILE;
use super::{checksums, refused};
use crate::DataError;
use crate::read::{require_local, with_ending};

/// LMDB's limit.
const MAX_KEY_BYTES: usize = 511;
/// Pending entries are committed when they reach this size, so they exceed it by at most one entry.
const BATCH_BYTES: usize = 1 << 26;
/// The initial map size of a database; it is doubled as often as needed.
const FIRST_MAP_BYTES: usize = 1 << 26;

/// Collects the options of an [`LmdbWriter`]; made by [`LmdbWriter::builder`].
#[derive(Clone, Debug)]
#[must_use = "call create() to get the writer"]
pub struct LmdbWriterBuilder {
    path: PathBuf,
    subdir: bool,
    checksums: bool,
    commit_every: usize,
}

impl LmdbWriterBuilder {
    /// Whether the path is a folder that holds the database as `data.mdb`, the default of Python's `lmdb.open`; off
    /// unless set: the path is the database's file.
    pub fn subdir(mut self, subdir: bool) -> Self {
        self.subdir = subdir;
        self
    }

    /// Whether to store a checksum of every value, in an extra entry (`__crc32c__`); off unless set.
    ///
    /// [`LmdbDataset`](crate::LmdbDataset) compares the values it reads with them; other readers only see that extra
    /// entry. The writer keeps all keys in memory until [`finish`](LmdbWriter::finish).
    pub fn checksums(mut self, checksums: bool) -> Self {
        self.checksums = checksums;
        self
    }

    /// The most entries of one transaction, which also ends when its entries reach 64 MiB; 10,000 unless set.
    pub fn commit_every(mut self, entries: usize) -> Self {
        self.commit_every = entries;
        self
    }

    /// Starts a database; an existing one at this path stays until [`finish`](LmdbWriter::finish).
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for transactions of no entries; [`DataError::Layout`] when the path is a folder and
    /// should be a file, and for a URL; [`DataError::Io`].
    pub fn create(self) -> Result<LmdbWriter, DataError> {
        DataError::at_least_1("commit_every", self.commit_every)?;
        require_local(&self.path)?;
        if !self.subdir && self.path.is_dir() {
            return Err(DataError::layout(&self.path, "the name of a file, or the option subdir", "a folder"));
        }
        let path = if self.subdir { self.path.join(DATA_FILE) } else { self.path.clone() };
        let part = with_ending(&path, ".part");
        let new_folder = (self.subdir && !self.path.exists()).then(|| self.path.clone());
        if self.subdir {
            fs::create_dir_all(&self.path).map_err(DataError::io(&self.path))?;
        }
        // LMDB would append to the file of an interrupted run.
        if part.exists() {
            fs::remove_file(&part).map_err(DataError::io(&part))?;
        }
        let mut writer = LmdbWriter {
            commit_every: self.commit_every,
            path,
            new_folder,
            environment: None,
            map_bytes: FIRST_MAP_BYTES,
            batch: BTreeMap::new(),
            batch_bytes: 0,
            checksums: self.checksums.then(BTreeMap::new),
            part,
        };
        // No other process opens this file, and `finish` syncs it.
        let flags = EnvironmentFlags::NO_SUB_DIR | EnvironmentFlags::NO_LOCK | EnvironmentFlags::NO_SYNC;
        let environment = Environment::new().set_flags(flags).set_map_size(writer.map_bytes).open(&writer.part);
        let environment = environment.map_err(refused(&writer.part))?;
        let database = environment.open_db(None).map_err(refused(&writer.part))?;
        writer.environment = Some((environment, database));
        Ok(writer)
    }
}

/// Writes a database, which appears at its path once it is complete.
///
/// ```
/// # let folder = std::env::temp_dir().join(format!("overdrive-doc-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder)?;
/// # let path = folder.join("train.mdb");
/// use overdrive_dataload::{Dataset, LmdbDataset, LmdbWriter};
///
/// let mut writer = LmdbWriter::builder(&path).checksums(true).create()?;
/// for i in 0..10 {
///     writer.write(format!("{i:08}").as_bytes(), b"the bytes of a picture")?;
/// }
/// writer.finish()?;
/// assert_eq!(LmdbDataset::open(&path)?.get(3)?.key(), b"00000003");
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Source
/// Python's `lmdb.Environment` with `begin(write=True)` and `put`.
pub struct LmdbWriter {
    commit_every: usize,
    path: PathBuf,
    part: PathBuf,
    /// Created by this writer, so removed again if the database is not finished.
    new_folder: Option<PathBuf>,
    /// `None` once closed.
    environment: Option<(Environment, Database)>,
    map_bytes: usize,
    batch: BTreeMap<Vec<u8>, Vec<u8>>,
    batch_bytes: usize,
    /// By key, if the option is on.
    checksums: Option<BTreeMap<Vec<u8>, u32>>,
}

impl LmdbWriter {
    /// Options for a database at `path`.
    pub fn builder(path: impl Into<PathBuf>) -> LmdbWriterBuilder {
        LmdbWriterBuilder { path: path.into(), subdir: false, checksums: false, commit_every: 10_000 }
    }

    /// Adds an entry; keys may be added in any order.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a key that is empty, longer than 511 bytes, reserved for the checksums, or
    /// already present (which may be noticed as late as in [`finish`](Self::finish)), and for a value of 4 GiB or more;
    /// [`DataError::Io`].
    pub fn write(&mut self, key: &[u8], value: &[u8]) -> Result<(), DataError> {
        if key.is_empty() || key.len() > MAX_KEY_BYTES || key == checksums::KEY {
            let expected = format!("1 to {MAX_KEY_BYTES} bytes, other than {}", checksums::KEY.escape_ascii());
            return Err(DataError::option("key", expected, key.escape_ascii()));
        }
        if u32::try_from(value.len()).is_err() {
            return Err(DataError::option("value", "less than 4 GiB", format!("{} bytes", value.len())));
        }
        let known = self.checksums.as_ref().is_some_and(|checksums| checksums.contains_key(key));
        if known || self.batch.contains_key(key) {
            return Err(duplicate(key));
        }
        if let Some(checksums) = &mut self.checksums {
            checksums.insert(key.to_vec(), checksums::of(key, value));
        }
        self.batch.insert(key.to_vec(), value.to_vec());
        self.batch_bytes += key.len() + value.len();
        if self.batch.len() >= self.commit_every || self.batch_bytes >= BATCH_BYTES {
            self.commit()?;
        }
        Ok(())
    }

    /// Completes the database and returns its file's path.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn finish(mut self) -> Result<PathBuf, DataError> {
        self.commit()?;
        if let Some(checksums) = self.checksums.take() {
            self.batch.insert(checksums::KEY.to_vec(), checksums::encode(checksums.into_values()));
            self.commit()?;
        }
        if let Some((environment, _)) = &self.environment {
            environment.sync(true).map_err(refused(&self.part))?;
        }
        // Unmaps and closes the file.
        self.environment = None;
        fs::rename(&self.part, &self.path).map_err(DataError::io(&self.path))?;
        self.new_folder = None;
        Ok(self.path.clone())
    }

    /// Commits the pending entries, enlarging the map as needed.
    fn commit(&mut self) -> Result<(), DataError> {
        let Some((environment, database)) = &self.environment else { return Ok(()) };
        loop {
            match put_all(environment, *database, &self.batch) {
                Ok(()) => break,
                Err((Error::MapFull, _)) => {
                    self.map_bytes = self.map_bytes.saturating_mul(2);
                    environment.set_map_size(self.map_bytes).map_err(refused(&self.part))?;
                }
                Err((Error::KeyExist, Some(key))) => return Err(duplicate(key)),
                Err((error, _)) => return Err(refused(&self.part)(error)),
            }
        }
        self.batch.clear();
        self.batch_bytes = 0;
        Ok(())
    }
}

impl Drop for LmdbWriter {
    fn drop(&mut self) {
        self.environment = None;
        _ = fs::remove_file(&self.part);
        if let Some(folder) = &self.new_folder {
            // Fails, and keeps the folder, if something else has been put there.
            _ = fs::remove_dir(folder);
        }
    }
}

/// Writes `batch` in one transaction; an error has the key that caused it.
fn put_all<'a>(
    environment: &Environment,
    database: Database,
    batch: &'a BTreeMap<Vec<u8>, Vec<u8>>,
) -> Result<(), (Error, Option<&'a [u8]>)> {
    let mut transaction = environment.begin_rw_txn().map_err(|error| (error, None))?;
    for (key, value) in batch {
        let put = transaction.put(database, key, value, WriteFlags::NO_OVERWRITE);
        put.map_err(|error| (error, Some(key.as_slice())))?;
    }
    transaction.commit().map_err(|error| (error, None))
}

fn duplicate(key: &[u8]) -> DataError {
    DataError::option("key", "one that the database does not have yet", key.escape_ascii())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.collect()
    }

    #[test]
    fn an_abandoned_database_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        for subdir in [false, true] {
            let path = dir.path().join("abandoned");
            let mut writer = LmdbWriter::builder(&path).subdir(subdir).commit_every(1).create().unwrap();
            writer.write(b"a", b"1").unwrap();
            assert_eq!(names(dir.path()), [if subdir { "abandoned" } else { "abandoned.part" }]);
            drop(writer);
            assert!(names(dir.path()).is_empty());
        }
    }

    #[test]
    fn keys_and_values_that_lmdb_does_not_take_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        for checksums in [false, true] {
            let mut writer = LmdbWriter::builder(dir.path().join("a")).checksums(checksums).create().unwrap();
            for key in [&b""[..], &[b'k'; 512], checksums::KEY] {
                assert!(matches!(writer.write(key, b""), Err(DataError::InvalidOption { option: "key", .. })));
            }
            writer.write(&[b'k'; 511], b"").unwrap();
            assert!(writer.write(&[b'k'; 511], b"").unwrap_err().to_string().contains("does not have yet"));
        }
        let folder = LmdbWriter::builder(dir.path()).create();
        assert!(matches!(folder, Err(DataError::Layout { .. })));
        assert!(LmdbWriter::builder(dir.path().join("b")).commit_every(0).create().is_err());
    }
}
