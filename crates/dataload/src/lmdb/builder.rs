//! Opening a database: the file is checked and its keys are listed before LMDB maps it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ::lmdb::{Database, Environment, EnvironmentFlags, Error, Transaction};

use super::checksums::{self, Checksums};
use super::index::{self, Stamp};
use super::keys::Keys;
use super::pages::{Pages, Tree};
use super::walk::{Value, walk};
use super::{LmdbDataset, refused};
use crate::DataError;
use crate::read::{first_of, is_url};

/// The name of the file in a database's folder.
pub(super) const DATA_FILE: &str = "data.mdb";

/// Collects the options of an [`LmdbDataset`]; made by [`LmdbDataset::builder`].
#[derive(Clone, Debug)]
#[must_use = "call open() to get the dataset"]
pub struct LmdbDatasetBuilder {
    path: PathBuf,
    database: Option<String>,
    index_file: Option<PathBuf>,
    read_ahead: bool,
    verify_crc: bool,
}

impl LmdbDatasetBuilder {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path, database: None, index_file: None, read_ahead: true, verify_crc: true }
    }

    /// Reads a named database instead of the main one.
    #[doc(alias = "open_db")]
    pub fn database(mut self, name: impl Into<String>) -> Self {
        self.database = Some(name.into());
        self
    }

    /// Keeps the keys in a file, so that the next run need not list them; no file unless set.
    ///
    /// The file is written when it is missing, and rewritten when the database has changed since. It is on this machine, also
    /// where the database is elsewhere.
    pub fn index_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.index_file = Some(path.into());
        self
    }

    /// Whether the operating system reads ahead after a value; on unless set.
    ///
    /// Turn it off for a file that is larger than memory and read in random order: then only the requested pages are
    /// read.
    #[doc(alias = "readahead")]
    pub fn read_ahead(mut self, read_ahead: bool) -> Self {
        self.read_ahead = read_ahead;
        self
    }

    /// Whether values are compared with their checksums, where the database has them; on unless set.
    pub fn verify_crc(mut self, verify: bool) -> Self {
        self.verify_crc = verify;
        self
    }

    /// Opens the database.
    ///
    /// Without an index file this reads every page that holds keys: a few seconds for millions of entries. Of a URL the
    /// whole file is fetched into the cache first.
    ///
    /// # Errors
    /// [`DataError::Corrupt`] with file and offset, for a file that is not an LMDB database, is truncated, or is
    /// damaged in a detectable way; [`DataError::CorruptEntry`] for damaged checksums; [`DataError::Layout`] for a
    /// database name that does not exist, integer or reversed keys, and duplicates; [`DataError::Io`]; [`DataError::Remote`].
    pub fn open(self) -> Result<LmdbDataset, DataError> {
        if self.database.as_ref().is_some_and(|name| name.contains('\0')) {
            return Err(DataError::option("database", "a name without a zero byte", format!("{:?}", self.database)));
        }
        if let Some(index_file) = self.index_file.as_ref().filter(|path| is_url(path)) {
            return Err(DataError::option("index_file", "a file of this machine", index_file.display()));
        }
        let path: Arc<Path> = self.file()?.into();
        let pages = Pages::open(path.clone())?;
        let mut keys = self.keys(&pages)?;
        let (environment, database) = self.map(&pages)?;
        let checksums = self.checksums(&environment, database, &path, &mut keys)?;
        Ok(LmdbDataset { environment, database, path, keys: Arc::new(keys), checksums })
    }

    /// The database's file. In a store, where a folder is only what names begin with, both may be there.
    fn file(&self) -> Result<PathBuf, DataError> {
        let in_folder = self.path.join(DATA_FILE);
        if is_url(&self.path) {
            let names = [in_folder, self.path.clone()];
            return Ok(first_of(&names)?.unwrap_or(&self.path).clone());
        }
        Ok(if self.path.is_dir() { in_folder } else { self.path.clone() })
    }

    /// The keys, from the index file or else from the tree.
    fn keys(&self, pages: &Pages) -> Result<Keys, DataError> {
        let Some(index_file) = &self.index_file else { return list(pages, self.database.as_deref()) };
        let stamp = Stamp::of(pages, self.database.as_deref());
        if let Some(keys) = index::load(index_file, &stamp)? {
            return Ok(keys);
        }
        let keys = list(pages, self.database.as_deref())?;
        index::save(index_file, &stamp, &keys)?;
        Ok(keys)
    }

    /// Lets LMDB map the file.
    fn map(&self, pages: &Pages) -> Result<(Environment, Database), DataError> {
        let path = pages.path();
        // Only writing would need the lock file; without it, the disk may be read-only.
        let mut flags = EnvironmentFlags::READ_ONLY
            | EnvironmentFlags::NO_SUB_DIR
            | EnvironmentFlags::NO_LOCK
            | EnvironmentFlags::NO_TLS;
        flags.set(EnvironmentFlags::NO_READAHEAD, !self.read_ahead);
        // The checked size of the pages: the map size in the file may be any number.
        let bytes = usize::try_from(pages.bytes()).map_err(|_| refused(path)(Error::MapFull))?;
        let environment = Environment::new()
            .set_flags(flags)
            .set_map_size(bytes)
            .set_max_dbs(self.database.is_some().into())
            .open(pages.name())
            .map_err(refused(path))?;
        let database = environment.open_db(self.database.as_deref()).map_err(refused(path))?;
        Ok((environment, database))
    }

    /// Removes the checksums' key from the keys, and reads its entry.
    fn checksums(
        &self,
        environment: &Environment,
        database: Database,
        path: &Path,
        keys: &mut Keys,
    ) -> Result<Option<Checksums>, DataError> {
        let Some(position) = keys.find(checksums::KEY) else { return Ok(None) };
        keys.remove(position);
        if !self.verify_crc {
            return Ok(None);
        }
        let transaction = environment.begin_ro_txn().map_err(refused(path))?;
        let entry = transaction.get(database, &checksums::KEY).map_err(refused(path))?;
        let entries = keys.len();
        Checksums::parse(entry, entries).map(Some).map_err(|found| DataError::CorruptEntry {
            path: path.to_owned(),
            key: checksums::KEY.escape_ascii().to_string(),
            expected: format!("checksums of {entries} entries"),
            found,
        })
    }
}

/// Lists the keys of a database. This checks its tree, and the main tree in which LMDB looks up its name.
fn list(pages: &Pages, database: Option<&str>) -> Result<Keys, DataError> {
    let (mut keys, mut trees) = (Keys::default(), Vec::new());
    let main = pages.main();
    walk(pages, main, &mut |key, value| match value {
        Value::Tree(tree) => trees.push((key.to_vec(), tree)),
        Value::Bytes if database.is_none() => keys.push(key),
        Value::Bytes => {}
    })?;
    let names = |trees: &[(Vec<u8>, Tree)]| {
        let names: Vec<String> =
            trees.iter().map(|(name, _)| format!("{:?}", name.escape_ascii().to_string())).collect();
        if names.is_empty() { "no named database".to_owned() } else { names.join(", ") }
    };
    match database {
        // Without a name, a database with only named ones would look empty.
        None if keys.len() == 0 && !trees.is_empty() => {
            let found = format!("named databases only: {}", names(&trees));
            Err(DataError::layout(pages.path(), "entries in the main database", found))
        }
        None => Ok(keys),
        Some(name) => match trees.iter().find(|(key, _)| key == name.as_bytes()) {
            Some(&(_, tree)) => {
                walk(pages, tree, &mut |key, value| {
                    if matches!(value, Value::Bytes) {
                        keys.push(key);
                    }
                })?;
                Ok(keys)
            }
            None => Err(DataError::layout(pages.path(), format!("a database named {name:?}"), names(&trees))),
        },
    }
}
