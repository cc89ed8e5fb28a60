//! A remote file, and which chunks of it are here.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use bytes::Bytes;
use object_store::Error;
use object_store::path::Path as Key;
use sha2::{Digest, Sha256};
use tokio::runtime::Runtime;

use super::cache::Entry;
use super::fetch::fetch;
use super::stats::{CACHED, Pending, count};
use super::store::{Store, locate, runtime, told};
use super::version::Version;
use super::{CHUNK, known, options};
use crate::DataError;
use crate::loader::lock;
use crate::read::NotFetched;

/// So many files stay open for whoever opens one again for its next sample, and need not check its chunks again. Together
/// they have at most this part of the cache's bytes: what is removed while it is open still takes room.
const RECENT: usize = 32;
const RECENT_PART: u64 = 4;
/// Who waits for a chunk looks up so often, to tell how far it is.
const LOOK_UP: Duration = Duration::from_secs(5);

/// A file of a store. It may be read by several threads.
pub(super) struct Object {
    store: Store,
    key: Key,
    /// What the cache calls it: the hash of its URL and version.
    pub(super) name: String,
    pub(super) version: Version,
    pub(super) entry: Entry,
    runtime: &'static Runtime,
    /// So many chunks are fetched ahead.
    ahead: u64,
    chunks: Mutex<Vec<Chunk>>,
    changed: Condvar,
}

/// What is known of a chunk.
#[derive(Clone)]
pub(super) enum Chunk {
    /// It may be in the cache.
    Unknown,
    Absent,
    /// Somebody looks for it in the cache, or it is being fetched.
    UnderWay,
    Here,
    Failed(io::ErrorKind, String),
}

/// The open files, so that readers of one file fetch it together.
#[derive(Default)]
struct Open {
    all: HashMap<String, Weak<Object>>,
    recent: VecDeque<Arc<Object>>,
}

impl Open {
    fn lock() -> MutexGuard<'static, Self> {
        static OPEN: LazyLock<Mutex<Open>> = LazyLock::new(Mutex::default);
        lock(&OPEN)
    }

    fn get(&mut self, name: &str) -> Option<Arc<Object>> {
        let object = self.all.get(name)?.upgrade()?;
        self.is_recent(&object);
        Some(object)
    }

    fn insert(&mut self, object: &Arc<Object>) {
        self.all.retain(|_, object| object.strong_count() > 0);
        self.all.insert(object.name.clone(), Arc::downgrade(object));
        self.is_recent(object);
    }

    fn is_recent(&mut self, object: &Arc<Object>) {
        self.recent.retain(|other| !Arc::ptr_eq(other, object));
        self.recent.push_front(Arc::clone(object));
        let (most, mut bytes) = (options::current().cache_bytes / RECENT_PART, 0);
        let kept = self.recent.iter().take(RECENT).take_while(|object| {
            bytes += object.version.size;
            bytes <= most
        });
        let kept = kept.count();
        self.recent.truncate(kept);
    }
}

/// Files that nobody reads are opened anew, by the options of then.
pub(super) fn close_unread() {
    let unread = std::mem::take(&mut Open::lock().recent);
    drop(unread);
}

/// The bytes of a chunk.
fn range(chunk: u64, version: &Version) -> Range<u64> {
    chunk * CHUNK..((chunk + 1) * CHUNK).min(version.size)
}

impl Object {
    pub(super) fn open(text: &str) -> Result<Arc<Self>, DataError> {
        let (store, key) = locate(text)?;
        let version = known::version(text, &store, &key)?;
        Self::make(text, store, key, version)
    }

    /// Opens a file of which a version is known.
    pub(super) fn open_version(text: &str, version: &Version) -> Result<Arc<Self>, DataError> {
        let (store, key) = locate(text)?;
        Self::make(text, store, key, version.clone())
    }

    fn make(text: &str, store: Store, key: Key, version: Version) -> Result<Arc<Self>, DataError> {
        let options = options::current();
        let Some(name) = version.name() else {
            let expected = "a server that gives an ETag or a date, so that a changed file is noticed";
            return Err(DataError::layout(Path::new(text), expected, "neither"));
        };
        if version.size > options.cache_bytes {
            let expected = format!("the {} bytes of {text} or more", version.size);
            return Err(DataError::option("cache_bytes", expected, options.cache_bytes));
        }
        let name = format!("{:x}", Sha256::digest(format!("{text}\0{name}")));
        if let Some(open) = Open::lock().get(&name) {
            return Ok(open);
        }
        let entry = Entry::open(&options.cache, &name, version.size, options.cache_bytes);
        let entry = entry.map_err(DataError::io(&options.cache))?;
        let made = Arc::new(Self {
            store,
            key,
            name,
            entry,
            runtime: runtime()?,
            ahead: options.ahead_bytes.div_ceil(CHUNK),
            chunks: Mutex::new(vec![Chunk::Unknown; version.size.div_ceil(CHUNK) as usize]),
            changed: Condvar::new(),
            version,
        });
        let mut open = Open::lock();
        // Another thread may have opened it meanwhile.
        if let Some(other) = open.get(&made.name) {
            return Ok(other);
        }
        open.insert(&made);
        Ok(made)
    }

    /// What was asked for and is not needed any more is not fetched, once nobody else reads the file.
    pub(super) fn give_up(self: &Arc<Self>) {
        Open::lock().recent.retain(|other| !Arc::ptr_eq(other, self));
    }

    fn set(&self, chunk: u64, state: Chunk) {
        lock(&self.chunks)[chunk as usize] = state;
        self.changed.notify_all();
    }

    /// Looks for a chunk in the cache, or has it fetched, without waiting for that. Errors of chunks that nobody waits for are
    /// forgotten: the server may be well again when they are needed.
    pub(super) fn ask(self: &Arc<Self>, chunk: u64, is_needed: bool) {
        let Some(state) = lock(&self.chunks).get_mut(chunk as usize).map(|state| match state {
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
        // A file that nobody reads any more is not fetched on: while a request waits for its turn, nothing keeps the
        // file open.
        let (object, store, key, version) =
            (Arc::downgrade(self), Arc::clone(&self.store), self.key.clone(), self.version.clone());
        self.runtime.spawn(async move {
            if may_be_cached && object.upgrade().is_none_or(|object| object.is_cached(chunk)) {
                return;
            }
            let range = range(chunk, &version);
            let pending = Pending::new(range.end - range.start);
            let fetched = fetch(&store, &key, &version, range, || object.strong_count() > 0).await;
            drop(pending);
            let Some(object) = object.upgrade() else { return };
            match object.keep(chunk, fetched) {
                Chunk::Failed(..) if !is_needed => object.set(chunk, Chunk::Absent),
                state => object.set(chunk, state),
            }
        });
    }

    /// Looks for a chunk in the cache.
    fn is_cached(&self, chunk: u64) -> bool {
        let range = range(chunk, &self.version);
        let bytes = range.end - range.start;
        let is_cached = self.entry.has(chunk, range.start, bytes as usize);
        if is_cached {
            count(&CACHED, bytes);
            self.set(chunk, Chunk::Here);
        }
        is_cached
    }

    fn keep(&self, chunk: u64, fetched: Result<Bytes, Error>) -> Chunk {
        match fetched {
            Ok(bytes) => match self.entry.write(chunk, chunk * CHUNK, &bytes) {
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
    pub(super) fn ask_from(self: &Arc<Self>, chunk: u64) {
        let end = chunk.saturating_add(self.ahead).min(self.version.size.div_ceil(CHUNK).saturating_sub(1));
        (chunk..=end).for_each(|next| self.ask(next, next == chunk));
    }

    /// Waits for a chunk. An error is told once, and then the chunk is fetched again.
    pub(super) fn wait_for(self: &Arc<Self>, chunk: u64) -> io::Result<()> {
        self.wait_and_tell(chunk, &mut |_| ())
    }

    /// The same; `tell` is given all chunks from time to time.
    pub(super) fn wait_and_tell(self: &Arc<Self>, chunk: u64, tell: &mut dyn FnMut(&[Chunk])) -> io::Result<()> {
        self.ask(chunk, true);
        let mut chunks = lock(&self.chunks);
        loop {
            tell(&chunks);
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
                    chunks = lock(&self.chunks);
                }
                Chunk::UnderWay => {
                    let waited = self.changed.wait_timeout(chunks, LOOK_UP);
                    chunks = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        }
    }

    pub(super) fn read_at(self: &Arc<Self>, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let end = offset.checked_add(buffer.len() as u64).filter(|end| *end <= self.version.size);
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
