//! Samples whose last steps are left to whoever has time for them.

use std::fmt;
use std::sync::Arc;

use crate::DataError;

/// A sample that has been read, what is still to be done to it, and what it is called in its shard.
pub struct Deferred<S> {
    work: Work<S>,
    key: Option<ItemKey>,
}

enum Work<S> {
    None(S),
    Left(Box<dyn FnOnce() -> Result<S, DataError> + Send>),
}

/// What a format calls an item, beside its number.
#[derive(Clone, Debug)]
pub(crate) enum ItemKey {
    Name(Arc<str>),
    /// A unit, and how many of them are before it.
    Place(&'static str, u64),
}

impl<S> Deferred<S> {
    /// A sample that is as it should be.
    pub fn ready(sample: S) -> Self {
        Self { work: Work::None(sample), key: None }
    }

    /// A sample that `work` makes, on any thread.
    pub fn later(work: impl FnOnce() -> Result<S, DataError> + Send + 'static) -> Self {
        Self { work: Work::Left(Box::new(work)), key: None }
    }

    /// The same with the item's name in its shard, which errors and faults tell.
    #[must_use]
    pub fn named(mut self, name: impl Into<Arc<str>>) -> Self {
        self.key = Some(ItemKey::Name(name.into()));
        self
    }

    /// The same with the item's place in its shard for a name, counted in `unit`: `at("byte", 512)`.
    #[must_use]
    pub fn at(mut self, unit: &'static str, number: u64) -> Self {
        self.key = Some(ItemKey::Place(unit, number));
        self
    }

    /// What the item is called in its shard, where its format has a name for it.
    pub fn key(&self) -> Option<String> {
        self.key.as_ref().map(ItemKey::to_string)
    }

    pub(crate) fn take_key(&mut self) -> Option<ItemKey> {
        self.key.take()
    }

    /// The sample, after the work that was left.
    ///
    /// # Errors
    /// That work's.
    pub fn get(self) -> Result<S, DataError> {
        match self.work {
            Work::None(sample) => Ok(sample),
            Work::Left(work) => work(),
        }
    }
}

impl<S: Send + 'static> Deferred<S> {
    /// What `transform` makes of the sample, later; the name stays.
    pub fn then<T>(self, transform: impl FnOnce(S) -> Result<T, DataError> + Send + 'static) -> Deferred<T> {
        let Self { work, key } = self;
        let work: Box<dyn FnOnce() -> Result<T, DataError> + Send> = match work {
            Work::None(sample) => Box::new(move || transform(sample)),
            Work::Left(work) => Box::new(move || transform(work()?)),
        };
        Deferred { work: Work::Left(work), key }
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
