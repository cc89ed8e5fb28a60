//! Stores, by their URLs.

use std::collections::HashMap;
use std::future::Future;
use std::path::{Path as FilePath, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;
use std::{env, io, thread};

use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::azure::{MicrosoftAzure, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorage, GoogleCloudStorageBuilder};
use object_store::http::{HttpBuilder, HttpStore};
use object_store::list::PaginatedListStore;
use object_store::path::Path as Key;
use object_store::{ClientOptions, Error, ObjectStore, ObjectStoreScheme, RetryConfig};
use tokio::runtime::{Builder, Handle, Runtime};
use url::{Position, Url};

use super::client::Counting;
use super::options::{self, Retries};
use crate::DataError;
use crate::read::{NotFetched, READABLE, Scheme, require_known};

/// A store, and the pages of its list; web servers have none.
pub(super) trait Files: ObjectStore {
    fn pages(&self) -> Option<&dyn PaginatedListStore>;
}

macro_rules! lists {
    ($($store:ty),*) => {$(
        impl Files for $store {
            fn pages(&self) -> Option<&dyn PaginatedListStore> {
                Some(self)
            }
        }
    )*};
}

lists!(AmazonS3, GoogleCloudStorage, MicrosoftAzure);

impl Files for HttpStore {
    fn pages(&self) -> Option<&dyn PaginatedListStore> {
        None
    }
}

pub(super) type Store = Arc<dyn Files>;

/// A server is silent at most so long before the store asks it again.
const SILENCE: Duration = Duration::from_secs(30);

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

/// Whether the server refuses.
pub(super) fn is_refusal(error: &Error) -> bool {
    match error {
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => true,
        // Lists have no error of their own for it, and the type of their errors is private.
        Error::Generic { source, .. } => {
            let text = source.to_string();
            ["status code: 401", "status code: 403"].iter().any(|status| text.contains(status))
        }
        _ => false,
    }
}

/// Whether the store itself has made a request again as often as it may. The type of its error is private.
pub(super) fn has_given_up(error: &Error) -> bool {
    matches!(error, Error::Generic { source, .. } if source.to_string().contains("Error performing "))
}

/// Whether it is the metadata service of a machine of Amazon's that does not answer: where the environment has no
/// credentials, the store asks it for some.
fn is_without_credentials(error: &Error) -> bool {
    matches!(error, Error::Generic { source, .. } if source.to_string().contains("/latest/api/token"))
}

/// What an error is for whoever reads the file.
pub(super) fn told(error: &Error) -> io::Error {
    let (kind, what) = match error {
        Error::NotFound { .. } => (io::ErrorKind::NotFound, "there is no such file"),
        Error::Precondition { .. } => (io::ErrorKind::InvalidData, "the file was changed since it was opened"),
        error if is_refusal(error) => {
            (io::ErrorKind::PermissionDenied, "the server refuses: check the credentials in the environment")
        }
        error if is_without_credentials(error) => (
            io::ErrorKind::PermissionDenied,
            "check the credentials: the environment has none, and this machine has no role that gives some; profiles in \
             ~/.aws are not read, and a public bucket needs AWS_SKIP_SIGNATURE=true",
        ),
        Error::NotSupported { .. } => (io::ErrorKind::Unsupported, "the server does not give parts of files"),
        _ => (io::ErrorKind::Other, "it could not be fetched"),
    };
    io::Error::new(kind, NotFetched(format!("{what} ({})", with_cause(error))))
}

pub(super) fn failed(url: &str) -> impl Fn(Error) -> DataError {
    move |error| DataError::Remote { url: PathBuf::from(url), error: told(&error) }
}

/// The environment does not say what a store needs.
fn unset(url: &str) -> impl Fn(Error) -> DataError {
    move |error| {
        let why = format!("check the credentials and endpoints in the environment ({})", with_cause(&error));
        let error = io::Error::new(io::ErrorKind::InvalidInput, NotFetched(why));
        DataError::Remote { url: PathBuf::from(url), error }
    }
}

/// An error with what it came of, which those of clients leave out: a name that is not found, a certificate.
fn with_cause(error: &Error) -> String {
    let (said, mut cause) = (error.to_string(), error as &dyn std::error::Error);
    while let Some(source) = cause.source() {
        cause = source;
    }
    let cause = cause.to_string();
    if said.contains(&cause) { said } else { format!("{said}: {cause}") }
}

/// A request takes as long as its answer keeps coming; but for what the environment says.
fn patient() -> ClientOptions {
    ClientOptions::new().with_timeout_disabled().with_read_timeout(SILENCE)
}

/// A client of the store, set by the environment.
fn build(kind: &ObjectStoreScheme, url: &Url, retries: Retries) -> Result<Store, Error> {
    let Retries { most: max_retries, timeout: retry_timeout } = retries;
    let retries = RetryConfig { max_retries, retry_timeout, ..RetryConfig::default() };
    let allowed = (url.scheme() == "http").then(|| ("allow_http".to_owned(), "true".to_owned()));
    let settings = settings().chain(allowed);
    // The builders have no trait in common.
    macro_rules! built {
        ($builder:expr) => {
            built!($builder, patient())
        };
        ($builder:expr, $client:expr) => {{
            let builder = $builder.with_client_options($client);
            let builder = settings.fold(builder, |builder, (name, value)| match name.to_ascii_lowercase().parse() {
                Ok(key) => builder.with_config(key, value),
                Err(_) => builder,
            });
            Arc::new(builder.with_retry(retries).with_http_connector(Counting).build()?)
        }};
    }
    Ok(match kind {
        ObjectStoreScheme::AmazonS3 => built!(AmazonS3Builder::new().with_url(url.as_str())),
        ObjectStoreScheme::GoogleCloudStorage => {
            // As that builder has it unless set: only an address of the user's own is not encrypted.
            built!(GoogleCloudStorageBuilder::new().with_url(url.as_str()), patient().with_allow_http(true))
        }
        ObjectStoreScheme::MicrosoftAzure => built!(MicrosoftAzureBuilder::new().with_url(url.as_str())),
        _ => built!(HttpBuilder::new().with_url(&url[..Position::BeforePath])),
    })
}

/// The store that a URL names, and the file's key in it.
pub(super) fn locate(text: &str) -> Result<(Store, Key), DataError> {
    static STORES: LazyLock<Mutex<HashMap<(String, Retries), Store>>> = LazyLock::new(Mutex::default);
    // A client needs the encryption that is chosen there.
    runtime()?;
    let invalid = |error: &dyn std::fmt::Display| DataError::option("url", READABLE, format!("{text}: {error}"));
    require_known(FilePath::new(text))?;
    let (scheme, rest) = text.split_once("://").ok_or_else(|| invalid(&"no scheme"))?;
    let (authority, key) = rest.split_once('/').ok_or_else(|| invalid(&"no name after the server's"))?;
    let is_web = Scheme::of(FilePath::new(text)) == Some(Scheme::Web);
    let server = format!("{scheme}://{authority}/");
    // A bucket's key may hold any character; an address of the web is escaped.
    let parsed = Url::parse(if is_web { text } else { &server }).map_err(|error| invalid(&error))?;
    if is_web && (parsed.query().is_some() || parsed.fragment().is_some()) {
        return Err(invalid(&"a query or a fragment would be left out"));
    }
    let (kind, web_key) = ObjectStoreScheme::parse(&parsed).map_err(|error| invalid(&error))?;
    // The address of a store begins with a bucket, that of any other server does not: it has one client.
    let place = match key.split_once('/') {
        Some((bucket, _)) if is_web && kind != ObjectStoreScheme::Http => format!("{server}{bucket}/"),
        _ => server,
    };
    let key = if is_web { web_key } else { Key::parse(key).map_err(|error| invalid(&error))? };
    let place = (place, options::current().retries);
    let mut stores = STORES.lock().unwrap_or_else(PoisonError::into_inner);
    let store = match stores.get(&place) {
        Some(store) => Arc::clone(store),
        None => {
            let store = build(&kind, &parsed, place.1).map_err(unset(text))?;
            Arc::clone(stores.entry(place).or_insert(store))
        }
    };
    Ok((store, key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_has_one_client_and_a_bucket_has_its_own() {
        let store = |text: &str| locate(text).unwrap().0;
        let is_one = |one, other| Arc::ptr_eq(&store(one), &store(other));
        assert!(is_one("http://127.0.0.1:9/a/x.tar", "http://127.0.0.1:9/b/y.tar"));
        assert!(!is_one("http://127.0.0.1:9/a/x.tar", "http://127.0.0.1:8/a/x.tar"));
        let amazon = |bucket: &str| format!("https://s3.us-east-1.amazonaws.com/{bucket}/x.tar");
        assert!(!is_one(&amazon("one"), &amazon("two")));
    }
}
