//! What servers say about their files.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

use futures_util::{StreamExt, stream};
use object_store::path::Path as Key;
use object_store::{Error, ObjectMeta, ObjectStoreExt};

use super::store::{Store, failed, is_refusal, locate, wait};
use super::url;
use super::version::Version;
use crate::DataError;

/// So many files are asked for at the same time.
const AT_ONCE: usize = 32;

/// What is known of files, by their URLs.
#[derive(Default)]
struct Known {
    /// Of those that were not opened since: whoever opens a dataset asks for all of its files.
    told: HashMap<String, Version>,
    /// Of those that stay as they are for a dataset, which opens them again and again.
    pinned: HashMap<String, Weak<Version>>,
}

fn known() -> MutexGuard<'static, Known> {
    static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The version of a file that is opened: that of a dataset that has pinned it or was told of it, or else that of today.
pub(super) fn version(text: &str, store: &Store, key: &Key) -> Result<Version, DataError> {
    let known_version = {
        let mut known = known();
        let pinned = known.pinned.get(text).and_then(Weak::upgrade);
        known.told.remove(text).or(pinned.as_deref().cloned())
    };
    match known_version {
        Some(version) => Ok(version),
        None => Ok(Version::from(&wait(store.head(key))?.map_err(failed(text))?)),
    }
}

/// As long as the result lives, the file is opened as this version, without another question.
pub(super) fn pin(text: &str, version: Version) -> Arc<Version> {
    let mut known = known();
    known.pinned.retain(|_, version| version.strong_count() > 0);
    if let Some(pinned) = known.pinned.get(text).and_then(Weak::upgrade).filter(|pinned| **pinned == version) {
        return pinned;
    }
    let pinned = Arc::new(version);
    known.pinned.insert(text.to_owned(), Arc::downgrade(&pinned));
    pinned
}

/// Looks for all of these files, several at a time, whatever was known of them: they are as they are now.
pub(crate) fn require<'a>(files: impl IntoIterator<Item = &'a PathBuf>) -> Result<(), DataError> {
    let mut asked = Vec::new();
    for file in files {
        let text = url(file)?;
        asked.push(ask(text.to_owned(), locate(text)?));
    }
    wait(async {
        let mut answers = stream::iter(asked).buffer_unordered(AT_ONCE);
        while let Some((text, answer)) = answers.next().await {
            let found = answer.map_err(failed(&text))?;
            known().told.insert(text, Version::from(&found));
        }
        Ok(())
    })?
}

/// The first of these files that is there. All are asked for at the same time.
pub(crate) fn first_of(files: &[PathBuf]) -> Result<Option<usize>, DataError> {
    let mut asked = Vec::new();
    for file in files {
        let text = url(file)?;
        asked.push(ask(text.to_owned(), locate(text)?));
    }
    wait(async {
        let mut answers = stream::iter(asked).buffered(AT_ONCE).enumerate();
        // Where nobody may list the files, an absent one is refused.
        let mut refused = None;
        while let Some((number, (text, answer))) = answers.next().await {
            match answer {
                Ok(found) => {
                    known().told.insert(text, Version::from(&found));
                    return Ok(Some(number));
                }
                Err(Error::NotFound { .. }) => {}
                Err(error) if is_refusal(&error) => {
                    refused.get_or_insert(failed(&text)(error));
                }
                Err(error) => return Err(failed(&text)(error)),
            }
        }
        refused.map_or(Ok(None), Err)
    })?
}

async fn ask(text: String, (store, key): (Store, Key)) -> (String, Result<ObjectMeta, Error>) {
    let answer = store.head(&key).await;
    (text, answer)
}
