//! Fetches a part of a file, and tries again where that may help.

use std::ops::Range;
use std::sync::LazyLock;
use std::time::Duration;

use bytes::Bytes;
use object_store::path::Path as Key;
use object_store::{Error, GetOptions};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use super::stats::{FAILED, count};
use super::store::{Store, is_refusal};
use super::version::Version;

/// So many requests are under way at the same time.
const AT_ONCE: usize = 16;
/// How often a part is asked for before that is an error; the store itself tries again where a server is overloaded.
const TRIES: u32 = 5;
/// A request takes at most so long, and then is tried again.
const LIMIT: Duration = Duration::from_secs(60);

/// The bytes of a range of this version of a file; an error once they are not wanted any more.
pub(super) async fn fetch(
    store: &Store,
    key: &Key,
    version: &Version,
    range: Range<u64>,
    is_wanted: impl Fn() -> bool,
) -> Result<Bytes, Error> {
    static REQUESTS: LazyLock<Semaphore> = LazyLock::new(|| Semaphore::new(AT_ONCE));
    let (length, range, is_wanted) = (range.end - range.start, &range, &is_wanted);
    tried(move || async move {
        // Waiting for a turn does not count as waiting for the server.
        let permit = REQUESTS.acquire().await;
        if !is_wanted() {
            // Not tried again.
            return Err(Error::Precondition { path: key.to_string(), source: "nobody reads the file any more".into() });
        }
        let answer = timeout(LIMIT, once(store, key, version, range.clone())).await;
        drop(permit);
        match answer {
            Ok(Ok(bytes)) if bytes.len() as u64 == length => Ok(bytes),
            Ok(Ok(bytes)) => Err(failed(format!("{} of {length} bytes came", bytes.len()))),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(failed(format!("no answer within {} s", LIMIT.as_secs()))),
        }
    })
    .await
}

/// Asks a few times, with growing pauses, unless the error says that this does not help.
pub(super) async fn tried<T, A: Future<Output = Result<T, Error>>>(ask: impl Fn() -> A) -> Result<T, Error> {
    let mut pause = Duration::from_millis(100);
    let mut tried = 1;
    loop {
        let error = match ask().await {
            Ok(answer) => return Ok(answer),
            Err(error) => error,
        };
        let is_final =
            matches!(error, Error::NotFound { .. } | Error::Precondition { .. } | Error::NotSupported { .. });
        if is_final || is_refusal(&error) || tried == TRIES {
            return Err(error);
        }
        tracing::debug!(%error, "asked again");
        sleep(pause).await;
        pause *= 2;
        tried += 1;
    }
}

async fn once(store: &Store, key: &Key, version: &Version, range: Range<u64>) -> Result<Bytes, Error> {
    let if_match = version.if_match();
    let found =
        store.get_opts(key, GetOptions { range: Some(range.into()), if_match, ..GetOptions::default() }).await?;
    if !version.is_of(&found.meta) {
        let source = "the file has another version".into();
        return Err(Error::Precondition { path: key.to_string(), source });
    }
    found.bytes().await
}

/// An error that only shows here, and that the client has not counted.
fn failed(why: String) -> Error {
    count(&FAILED, 1);
    Error::Generic { store: "remote file", source: why.into() }
}
