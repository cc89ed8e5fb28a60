//! Fetches a part of a file, and tries again where that may help.

use std::ops::Range;
use std::sync::LazyLock;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use object_store::path::Path as Key;
use object_store::{Error, GetOptions};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use super::options;
use super::stats::{FAILED, count};
use super::store::{Store, has_given_up, is_refusal};
use super::version::Version;

/// So many requests are under way at the same time.
const AT_ONCE: usize = 16;
/// How often a part is asked for whose answers are cut, before that is an error. Where a server is overloaded, the store
/// itself tries again.
const TRIES: usize = 5;
/// A server is silent at most so long within an answer; then the part is asked for again. An answer may take longer: where
/// a line is slow, many share it.
const SILENCE: Duration = Duration::from_secs(60);

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
        let answer = match once(store, key, version, range.clone()).await {
            Ok(pieces) => together(pieces, length).await,
            Err(error) => Err(error),
        };
        drop(permit);
        answer
    })
    .await
}

/// Asks a few times, with growing pauses, unless the error says that this does not help.
pub(super) async fn tried<T, A: Future<Output = Result<T, Error>>>(ask: impl Fn() -> A) -> Result<T, Error> {
    let tries = options::current().retries.most.saturating_add(1).min(TRIES);
    let mut pause = Duration::from_millis(100);
    let mut tried = 1;
    loop {
        let error = match ask().await {
            Ok(answer) => return Ok(answer),
            Err(error) => error,
        };
        let is_final =
            matches!(error, Error::NotFound { .. } | Error::Precondition { .. } | Error::NotSupported { .. });
        if is_final || is_refusal(&error) || has_given_up(&error) || tried == tries {
            return Err(error);
        }
        tracing::debug!(%error, "asked again");
        sleep(pause).await;
        pause *= 2;
        tried += 1;
    }
}

type Pieces = BoxStream<'static, Result<Bytes, Error>>;

/// Asks once, and returns the answer's content.
async fn once(store: &Store, key: &Key, version: &Version, range: Range<u64>) -> Result<Pieces, Error> {
    let if_match = version.if_match();
    let asked = GetOptions { range: Some(range.into()), if_match, ..GetOptions::default() };
    // The store makes the request again itself.
    let patience = options::current().retries.timeout.saturating_add(SILENCE);
    let found = heard(store.get_opts(key, asked), patience).await??;
    if !version.is_of(&found.meta) {
        let source = "the file has another version".into();
        return Err(Error::Precondition { path: key.to_string(), source });
    }
    Ok(found.into_stream())
}

/// The pieces of an answer of this length.
async fn together(mut pieces: Pieces, length: u64) -> Result<Bytes, Error> {
    let mut bytes = Vec::with_capacity(length as usize);
    while let Some(piece) = heard(pieces.next(), SILENCE).await? {
        bytes.extend_from_slice(&piece?);
        // A server may send on without an end.
        if bytes.len() as u64 > length {
            return Err(failed(format!("more than {length} bytes came")));
        }
    }
    match bytes.len() as u64 == length {
        true => Ok(bytes.into()),
        false => Err(failed(format!("{} of {length} bytes came", bytes.len()))),
    }
}

/// What a server says next.
async fn heard<T>(answer: impl Future<Output = T>, patience: Duration) -> Result<T, Error> {
    timeout(patience, answer).await.map_err(|_| failed(format!("no answer within {} s", patience.as_secs())))
}

/// An error that only shows here, and that the client has not counted.
fn failed(why: String) -> Error {
    count(&FAILED, 1);
    Error::Generic { store: "remote file", source: why.into() }
}

#[cfg(test)]
mod tests {
    use futures_util::stream;
    use tokio::runtime::Builder;

    use super::*;

    /// What comes of so many pieces of two bytes, each so many seconds after the one before, where six bytes are asked
    /// for.
    fn answer(pieces: usize, seconds: u64) -> Result<Bytes, String> {
        let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let piece = move |number: usize| async move {
            sleep(Duration::from_secs(seconds)).await;
            Ok(Bytes::from(vec![number as u8; 2]))
        };
        let pieces = stream::iter(0..pieces).then(piece).boxed();
        runtime.block_on(together(pieces, 6)).map_err(|error| error.to_string())
    }

    #[test]
    fn an_answer_may_take_long_and_neither_stop_nor_go_on_without_an_end() {
        assert_eq!(answer(3, 50), Ok(Bytes::from_static(&[0, 0, 1, 1, 2, 2])));
        assert!(answer(3, 61).unwrap_err().contains("no answer within 60 s"));
        assert!(answer(2, 0).unwrap_err().contains("4 of 6 bytes came"));
        assert!(answer(usize::MAX, 0).unwrap_err().contains("more than 6 bytes came"));
    }
}
