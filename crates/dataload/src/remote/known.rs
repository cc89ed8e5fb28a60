//! What servers say about their files.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use futures_util::{StreamExt, stream};
use object_store::path::Path as Key;
use object_store::{Error, ObjectMeta, ObjectStoreExt};

use super::store::{Store, failed, is_refusal, locate, wait};
use super::url;
use super::version::Version;
use crate::DataError;

/// So many files are asked for at the same time.
const AT_ONCE: usize = 32;

/// What was told of files that were not opened since, by their URLs: whoever opens a dataset asks for all of its files.
fn told() -> MutexGuard<'static, HashMap<String, Version>> {
    static TOLD: LazyLock<Mutex<HashMap<String, Version>>> = LazyLock::new(Mutex::default);
    TOLD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The version of a file that is opened: that of which a dataset was told, or else that of today.
pub(super) fn version(text: &str, store: &Store, key: &Key) -> Result<Version, DataError> {
    let known = told().remove(text);
    match known {
        Some(version) => Ok(version),
        None => Ok(Version::from(&wait(store.head(key))?.map_err(failed(text))?)),
    }
}

/// Looks for all of these files, several at a time, whatever was known of them. Where they `are_opened` next, they are
/// those of now.
pub(crate) fn require<'a>(files: impl IntoIterator<Item = &'a PathBuf>, are_opened: bool) -> Result<(), DataError> {
    let mut asked = Vec::new();
    for file in files {
        let text = url(file)?;
        asked.push(ask(text.to_owned(), locate(text)?));
    }
    wait(async {
        let mut answers = stream::iter(asked).buffer_unordered(AT_ONCE);
        while let Some((text, answer)) = answers.next().await {
            let found = answer.map_err(failed(&text))?;
            if are_opened {
                told().insert(text, Version::from(&found));
            }
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
                    told().insert(text, Version::from(&found));
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
