//! Fetches a part of a file, and tries again where that may help.

use std::ops::Range;
use std::sync::LazyLock;
use std::time::Duration;

use bytes::Bytes;
use object_store::path::Path as Key;
use object_store::{Error, GetOptions, ObjectMeta};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use super::store::Store;

/// So many requests are under way at the same time.
const AT_ONCE: usize = 16;
/// How often a part is asked for before that is an error; the store itself tries again where a server is overloaded.
const TRIES: u32 = 5;
/// A request takes at most so long, and then is tried again.
const LIMIT: Duration = Duration::from_secs(60);

/// The bytes of a range of this version of a file.
pub(super) async fn fetch(store: &Store, key: &Key, meta: &ObjectMeta, range: Range<u64>) -> Result<Bytes, Error> {
    static REQUESTS: LazyLock<Semaphore> = LazyLock::new(|| Semaphore::new(AT_ONCE));
    let length = range.end - range.start;
    let mut pause = Duration::from_millis(100);
    for tried in 1.. {
        // Waiting for a turn does not count as waiting for the server.
        let permit = REQUESTS.acquire().await;
        let answer = timeout(LIMIT, once(store, key, meta, range.clone())).await;
        drop(permit);
        let error = match answer {
            Ok(Ok(bytes)) if bytes.len() as u64 == length => return Ok(bytes),
            Ok(Ok(bytes)) => generic(format!("{} of {length} bytes came", bytes.len())),
            Ok(Err(error)) => error,
            Err(_) => generic(format!("no answer within {} s", LIMIT.as_secs())),
        };
        let is_final = matches!(
            error,
            Error::NotFound { .. }
                | Error::Precondition { .. }
                | Error::PermissionDenied { .. }
                | Error::Unauthenticated { .. }
                | Error::NotSupported { .. }
        );
        if is_final || tried == TRIES {
            return Err(error);
        }
        tracing::debug!(%key, ?range, %error, "fetched again");
        sleep(pause).await;
        pause *= 2;
    }
    Err(generic("it was not tried".to_owned()))
}

async fn once(store: &Store, key: &Key, meta: &ObjectMeta, range: Range<u64>) -> Result<Bytes, Error> {
    // A weak tag never matches, by HTTP's rules.
    let if_match = meta.e_tag.clone().filter(|tag| !tag.starts_with("W/"));
    let found =
        store.get_opts(key, GetOptions { range: Some(range.into()), if_match, ..GetOptions::default() }).await?;
    // Not every server looks at the condition.
    let is_same = match &meta.e_tag {
        Some(tag) => found.meta.e_tag.as_ref() == Some(tag),
        None => found.meta.last_modified == meta.last_modified,
    };
    if !is_same || found.meta.size != meta.size {
        let source = "the file has another version".into();
        return Err(Error::Precondition { path: key.to_string(), source });
    }
    found.bytes().await
}

fn generic(why: String) -> Error {
    Error::Generic { store: "remote file", source: why.into() }
}
