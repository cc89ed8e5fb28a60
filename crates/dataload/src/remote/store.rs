//! Stores, and what they say about their files.

use std::collections::HashMap;
use std::future::Future;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::{env, io, thread};

use object_store::path::Path as Key;
use object_store::{Error, ObjectMeta, ObjectStore, ObjectStoreExt, parse_url_opts};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::task::JoinSet;
use url::Url;

use super::url;
use crate::DataError;
use crate::read::NotFetched;

/// So many files are asked for at the same time.
const AT_ONCE: usize = 32;

pub(super) type Store = Arc<dyn ObjectStore>;

/// The threads that talk to servers.
pub(super) fn runtime() -> Result<&'static Runtime, DataError> {
    static RUNTIME: LazyLock<io::Result<Runtime>> = LazyLock::new(|| {
        // A program that uses TLS too may have chosen its own.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(2).thread_name("remote files").enable_all().build()
    });
    RUNTIME.as_ref().map_err(|error| DataError::Io {
        path: PathBuf::from("remote files"),
        error: io::Error::new(error.kind(), error.to_string()),
    })
}

/// Waits for an answer, also where the caller itself runs on threads of tokio's, which must not wait.
pub(super) fn wait<T: Send>(answer: impl Future<Output = T> + Send) -> Result<T, DataError> {
    let runtime = runtime()?;
    if Handle::try_current().is_err() {
        return Ok(runtime.block_on(answer));
    }
    let waited = thread::scope(|scope| scope.spawn(|| runtime.block_on(answer)).join());
    waited.map_err(|_| DataError::Io {
        path: PathBuf::from("remote files"),
        error: io::Error::other("a thread panicked"),
    })
}

/// What the environment says of stores. Names without a store's own prefix, such as `TOKEN`, mean something else.
fn settings() -> impl Iterator<Item = (String, String)> {
    let texts = env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    texts.filter(|(name, _)| ["AWS_", "GOOGLE_", "AZURE_"].iter().any(|store| name.starts_with(store)))
}

/// What an error is for whoever reads the file.
pub(super) fn told(error: &Error) -> io::Error {
    let (kind, what) = match error {
        Error::NotFound { .. } => (io::ErrorKind::NotFound, "there is no such file"),
        Error::Precondition { .. } => (io::ErrorKind::InvalidData, "the file was changed since it was opened"),
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => {
            (io::ErrorKind::PermissionDenied, "the server refuses: check the credentials in the environment")
        }
        Error::NotSupported { .. } => (io::ErrorKind::Unsupported, "the server does not give parts of files"),
        _ => (io::ErrorKind::Other, "it could not be fetched"),
    };
    io::Error::new(kind, NotFetched(format!("{what} ({error})")))
}

pub(super) fn failed(url: &str) -> impl Fn(Error) -> DataError {
    move |error| DataError::Remote { url: PathBuf::from(url), error: told(&error) }
}

/// The store that a URL names, and the file's key in it.
pub(super) fn locate(text: &str) -> Result<(Store, Key), DataError> {
    static STORES: LazyLock<Mutex<HashMap<String, Store>>> = LazyLock::new(Mutex::default);
    // A client needs the encryption that is chosen there.
    runtime()?;
    let invalid = |error: &dyn std::fmt::Display| {
        DataError::option(
            "url",
            "`s3://bucket/key`, `gs://`, `az://`, `http://` or `https://`",
            format!("{text}: {error}"),
        )
    };
    let (scheme, rest) = text.split_once("://").ok_or_else(|| invalid(&"no scheme"))?;
    let (authority, key) = rest.split_once('/').ok_or_else(|| invalid(&"no name after the server's"))?;
    let is_web = scheme.starts_with("http");
    // A bucket's key may hold any character; an address of the web is escaped, and may begin with a bucket.
    let place = match (is_web, key.split_once('/')) {
        (true, Some((first, _))) => format!("{scheme}://{authority}/{first}/"),
        _ => format!("{scheme}://{authority}/"),
    };
    let parsed = Url::parse(if is_web { text } else { &place }).map_err(|error| invalid(&error))?;
    if is_web && (parsed.query().is_some() || parsed.fragment().is_some()) {
        return Err(invalid(&"a query or a fragment would be left out"));
    }
    let mut stores = STORES.lock().unwrap_or_else(PoisonError::into_inner);
    let allowed = (scheme == "http").then(|| ("allow_http".to_owned(), "true".to_owned()));
    let key = match is_web {
        true => object_store::ObjectStoreScheme::parse(&parsed).map_err(|error| invalid(&error))?.1,
        false => Key::parse(key).map_err(|error| invalid(&error))?,
    };
    let store = match stores.get(&place) {
        Some(store) => Arc::clone(store),
        None => {
            let (store, _) = parse_url_opts(&parsed, settings().chain(allowed)).map_err(failed(text))?;
            Arc::clone(stores.entry(place).or_insert(Arc::from(store)))
        }
    };
    Ok((store, key))
}

/// What is known of files that were not opened since, by their URLs: whoever opens a dataset asks for all of its files.
static KNOWN: LazyLock<Mutex<HashMap<String, ObjectMeta>>> = LazyLock::new(Mutex::default);

fn known() -> MutexGuard<'static, HashMap<String, ObjectMeta>> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The size and version of a file that is opened: those that its dataset was told, and later those of today.
pub(super) fn head(text: &str, store: &Store, key: &Key) -> Result<ObjectMeta, DataError> {
    // Not in the `match`, which would hold the lock.
    let told = known().remove(text);
    match told {
        Some(meta) => Ok(meta),
        None => wait(store.head(key))?.map_err(failed(text)),
    }
}

/// Looks for all of these files, several at a time.
pub(crate) fn require<'a>(files: impl IntoIterator<Item = &'a PathBuf>) -> Result<(), DataError> {
    let mut located = Vec::new();
    for file in files {
        let text = url(file)?;
        if known().contains_key(text) {
            continue;
        }
        located.push((text.to_owned(), locate(text)?));
    }
    wait(async {
        let (mut waiting, mut asked) = (located.into_iter(), JoinSet::new());
        loop {
            while asked.len() < AT_ONCE
                && let Some((text, (store, key))) = waiting.next()
            {
                asked.spawn(async move { (store.head(&key).await, text) });
            }
            let Some(answer) = asked.join_next().await else { return Ok(()) };
            let (found, text) = answer.map_err(|error| DataError::Io {
                path: PathBuf::from("remote files"),
                error: io::Error::other(error),
            })?;
            let found = found.map_err(failed(&text))?;
            known().insert(text, found);
        }
    })?
}
