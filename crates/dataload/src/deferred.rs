//! Samples whose last processing steps run later, on any worker.

use std::fmt;
use std::sync::Arc;

use crate::DataError;

/// A sample that has been read, the work that remains to be done on it, and its name in its shard.
pub struct Deferred<S> {
    work: Work<S>,
    key: Option<ItemKey>,
    bytes: usize,
}

enum Work<S> {
    None(S),
    Left(Box<dyn FnOnce() -> Result<S, DataError> + Send>),
}

/// A format's own name for an item, in addition to the item's number.
#[derive(Clone, Debug)]
pub(crate) enum ItemKey {
    Name(Arc<str>),
    /// A unit and an offset in that unit.
    Place(&'static str, u64),
}

impl<S> Deferred<S> {
    /// A sample that needs no more work.
    pub fn ready(sample: S) -> Self {
        Self { work: Work::None(sample), key: None, bytes: 0 }
    }

    /// A sample that `work` makes, on any thread.
    pub fn later(work: impl FnOnce() -> Result<S, DataError> + Send + 'static) -> Self {
        Self { work: Work::Left(Box::new(work)), key: None, bytes: 0 }
    }

    /// Sets the item's name in its shard, which errors and faults show.
    #[must_use]
    pub fn named(mut self, name: impl Into<Arc<str>>) -> Self {
        self.key = Some(ItemKey::Name(name.into()));
        self
    }

    /// Names the item by its offset in its shard, counted in `unit`: `at("byte", 512)`.
    #[must_use]
    pub fn at(mut self, unit: &'static str, number: u64) -> Self {
        self.key = Some(ItemKey::Place(unit, number));
        self
    }

    /// Sets how many bytes of memory the sample takes until its work is done: they bound what a loader holds of it, see
    /// [`shuffle_buffer_bytes`](crate::DataLoaderBuilder::shuffle_buffer_bytes). 0 unless set.
    #[must_use]
    pub fn of_bytes(mut self, bytes: usize) -> Self {
        self.bytes = bytes;
        self
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The item's name in its shard, where the format gives it one.
    pub fn key(&self) -> Option<String> {
        self.key.as_ref().map(ItemKey::to_string)
    }

    /// Puts the name of the shard that the item is from before its own, where its shard has parts of several.
    pub(crate) fn within(mut self, shard: &str) -> Self {
        let name = self.key.map_or_else(|| shard.to_owned(), |key| format!("{shard}, {key}"));
        self.key = Some(ItemKey::Name(name.into()));
        self
    }

    pub(crate) fn with_key(mut self, key: Option<ItemKey>) -> Self {
        self.key = key;
        self
    }

    pub(crate) fn take_key(&mut self) -> Option<ItemKey> {
        self.key.take()
    }

    /// Does the remaining work and returns the sample.
    ///
    /// # Errors
    /// Those of that work.
    pub fn get(self) -> Result<S, DataError> {
        match self.work {
            Work::None(sample) => Ok(sample),
            Work::Left(work) => work(),
        }
    }
}

impl<S: Send + 'static> Deferred<S> {
    /// Adds `transform` to the remaining work; the name and the bytes stay.
    pub fn then<T>(self, transform: impl FnOnce(S) -> Result<T, DataError> + Send + 'static) -> Deferred<T> {
        let Self { work, key, bytes } = self;
        let work: Box<dyn FnOnce() -> Result<T, DataError> + Send> = match work {
            Work::None(sample) => Box::new(move || transform(sample)),
            Work::Left(work) => Box::new(move || transform(work()?)),
        };
        Deferred { work: Work::Left(work), key, bytes }
    }
}

impl fmt::Display for ItemKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Place(unit, number) => write!(f, "{unit} {number}"),
        }
    }
}

impl<S> fmt::Debug for Deferred<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = if matches!(self.work, Work::None(_)) { "ready" } else { "later" };
        f.debug_tuple("Deferred").field(&state).field(&self.key()).finish()
    }
}
