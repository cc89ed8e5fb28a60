//! A remote file that is read like a local one.

use std::collections::HashMap;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

use object_store::ObjectMeta;
use object_store::path::Path as Key;
use sha2::{Digest, Sha256};
use tokio::runtime::Runtime;

use super::cache::Entry;
use super::fetch::fetch;
use super::store::{Store, head, locate, runtime, told};
use super::{CHUNK, options, url};
use crate::DataError;
use crate::read::NotFetched;

/// A file of a store. It may be read by several threads.
struct Object {
    store: Store,
    key: Key,
    meta: ObjectMeta,
    entry: Entry,
    runtime: &'static Runtime,
    /// So many chunks are fetched ahead.
    ahead: u64,
    chunks: Mutex<Vec<Chunk>>,
    changed: Condvar,
}

/// What is known of a chunk.
#[derive(Clone)]
enum Chunk {
    /// It may be in the cache.
    Unknown,
    Absent,
    /// Somebody looks for it in the cache, or it is being fetched.
    UnderWay,
    Here,
    Failed(io::ErrorKind, String),
}

/// The open files, so that readers of one file fetch it together.
static OPEN: LazyLock<Mutex<HashMap<String, Weak<Object>>>> = LazyLock::new(Mutex::default);

impl Object {
    fn open(text: &str) -> Result<Arc<Self>, DataError> {
        let lock = || OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let (store, key) = locate(text)?;
        let (meta, options) = (head(text, &store, &key)?, options::current());
        if meta.e_tag.is_none() && meta.last_modified.timestamp() == 0 {
            let expected = "a server that gives an ETag or a date, so that a changed file is noticed";
            return Err(DataError::layout(Path::new(text), expected, "neither"));
        }
        if meta.size > options.cache_bytes {
            let expected = format!("the {} bytes of {text} or more", meta.size);
            return Err(DataError::option("cache_bytes", expected, options.cache_bytes));
        }
        let version = meta.e_tag.clone().unwrap_or_else(|| meta.last_modified.to_rfc3339());
        let name = format!("{:x}", Sha256::digest(format!("{text}\0{version}\0{}", meta.size)));
        if let Some(open) = lock().get(&name).and_then(Weak::upgrade) {
            return Ok(open);
        }
        let entry = Entry::open(&options.cache, &name, meta.size, options.cache_bytes);
        let entry = entry.map_err(DataError::io(&options.cache))?;
        let made = Arc::new(Self {
            store,
            key,
            entry,
            runtime: runtime()?,
            ahead: options.ahead_bytes.div_ceil(CHUNK),
            chunks: Mutex::new(vec![Chunk::Unknown; meta.size.div_ceil(CHUNK) as usize]),
            changed: Condvar::new(),
            meta,
        });
        let mut open = lock();
        open.retain(|_, object| object.strong_count() > 0);
        // Another thread may have opened it meanwhile.
        if let Some(other) = open.get(&name).and_then(Weak::upgrade) {
            return Ok(other);
        }
        open.insert(name, Arc::downgrade(&made));
        Ok(made)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Chunk>> {
        self.chunks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, chunk: u64, state: Chunk) {
        self.lock()[chunk as usize] = state;
        self.changed.notify_all();
    }

    fn range(&self, chunk: u64) -> std::ops::Range<u64> {
        chunk * CHUNK..((chunk + 1) * CHUNK).min(self.meta.size)
    }

    /// Looks for a chunk in the cache, or has it fetched, without waiting for that. Errors of chunks that nobody waits for are
    /// forgotten: the server may be well again when they are needed.
    fn ask(self: &Arc<Self>, chunk: u64, is_needed: bool) {
        let Some(state) = self.lock().get_mut(chunk as usize).map(|state| match state {
            Chunk::Unknown | Chunk::Absent => std::mem::replace(state, Chunk::UnderWay),
            _ => Chunk::Here,
        }) else {
            return;
        };
        let may_be_cached = match state {
            Chunk::Unknown => true,
            Chunk::Absent => false,
            _ => return,
        };
        // A file that nobody reads any more is not fetched on.
        let object = Arc::downgrade(self);
        self.runtime.spawn(async move {
            let Some(object) = object.upgrade() else { return };
            let state = match object.find(chunk, may_be_cached).await {
                Chunk::Failed(..) if !is_needed => Chunk::Absent,
                state => state,
            };
            object.set(chunk, state);
        });
    }

    async fn find(&self, chunk: u64, may_be_cached: bool) -> Chunk {
        let range = self.range(chunk);
        let bytes = (range.end - range.start) as usize;
        if may_be_cached && self.entry.has(chunk, range.start, bytes) {
            return Chunk::Here;
        }
        let start = range.start;
        match fetch(&self.store, &self.key, &self.meta, range).await {
            Ok(bytes) => match self.entry.write(chunk, start, &bytes) {
                Ok(()) => Chunk::Here,
                Err(error) => Chunk::Failed(error.kind(), format!("it could not be kept in the cache: {error}")),
            },
            Err(error) => {
                let error = told(&error);
                Chunk::Failed(error.kind(), error.to_string())
            }
        }
    }

    /// Asks for a chunk, and for those after it that are fetched ahead.
    fn ask_from(self: &Arc<Self>, chunk: u64) {
        let end = chunk.saturating_add(self.ahead).min(self.meta.size.div_ceil(CHUNK).saturating_sub(1));
        (chunk..=end).for_each(|next| self.ask(next, next == chunk));
    }

    /// Waits for a chunk. An error is told once, and then the chunk is fetched again.
    fn wait_for(self: &Arc<Self>, chunk: u64) -> io::Result<()> {
        self.ask(chunk, true);
        let mut chunks = self.lock();
        loop {
            match &chunks[chunk as usize] {
                Chunk::Here => return Ok(()),
                Chunk::Failed(kind, why) => {
                    let error = io::Error::new(*kind, NotFetched(why.clone()));
                    chunks[chunk as usize] = Chunk::Absent;
                    return Err(error);
                }
                // Another reader was told of its error meanwhile, or it was fetched ahead and failed.
                Chunk::Absent | Chunk::Unknown => {
                    drop(chunks);
                    self.ask(chunk, true);
                    chunks = self.lock();
                }
                Chunk::UnderWay => chunks = self.changed.wait(chunks).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    fn read_at(self: &Arc<Self>, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let end = offset.checked_add(buffer.len() as u64).filter(|end| *end <= self.meta.size);
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        if buffer.is_empty() {
            return Ok(());
        }
        let (first, last) = (offset / CHUNK, (end - 1) / CHUNK);
        (first..=last).for_each(|chunk| self.ask(chunk, true));
        (first..=last).try_for_each(|chunk| self.wait_for(chunk))?;
        self.entry.read(offset, buffer)
    }
}

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

    pub(crate) fn len(&self) -> u64 {
        self.object.meta.size
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
