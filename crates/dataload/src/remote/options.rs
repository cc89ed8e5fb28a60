//! Where remote files are kept on the disk.

use std::env;
use std::path::PathBuf;
use std::sync::{OnceLock, PoisonError, RwLock};
use std::time::Duration;

use super::object::close_unread;
use crate::DataError;
use crate::read::is_url;

/// How remote files are read.
///
/// ```
/// use overdrive_dataload::{RemoteOptions, configure_remote};
///
/// # let folder = std::env::temp_dir().join("overdrive-doc-remote");
/// configure_remote(RemoteOptions::default().cache(folder).cache_bytes(200 << 30))?;
/// // From here on: WebDataset::open("s3://bucket/train-{000..127}.tar")
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "options do nothing until `configure_remote`"]
pub struct RemoteOptions {
    pub(super) cache: PathBuf,
    pub(super) cache_bytes: u64,
    pub(super) ahead_bytes: u64,
    pub(super) retries: Retries,
}

/// How often a request is made again, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Retries {
    pub(super) most: usize,
    pub(super) timeout: Duration,
}

impl Default for RemoteOptions {
    fn default() -> Self {
        let home = env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        let home = home.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache")));
        let cache = home.unwrap_or_else(env::temp_dir).join("overdrive/remote");
        let retries = Retries { most: 10, timeout: Duration::from_secs(180) };
        Self { cache, cache_bytes: 64 << 30, ahead_bytes: 16 << 20, retries }
    }
}

impl RemoteOptions {
    /// The folder in which chunks are kept; default `overdrive/remote` in `XDG_CACHE_HOME` or `~/.cache`. All processes of
    /// a machine may share it.
    pub fn cache(mut self, folder: impl Into<PathBuf>) -> Self {
        self.cache = folder.into();
        self
    }

    /// The most bytes in that folder; default 64 GiB. The files that were opened longest ago are removed first.
    pub fn cache_bytes(mut self, bytes: u64) -> Self {
        self.cache_bytes = bytes;
        self
    }

    /// How far a file that is read from front to back is fetched ahead; default 16 MiB. This is memory, too, while it is
    /// under way.
    pub fn ahead_bytes(mut self, bytes: u64) -> Self {
        self.ahead_bytes = bytes;
        self
    }

    /// How often a request is made again at most, where its server is out of order or busy (408, 429, 500 and above) or
    /// cannot be reached; default 10, with pauses that grow from 0.1 s to 15 s. After that it is a [`DataError::Remote`].
    ///
    /// An answer that stops or is too short is asked for anew up to four times besides, but not more often than this.
    ///
    /// # Source
    /// `RetryConfig` of the crate `object_store`.
    pub fn max_retries(mut self, retries: usize) -> Self {
        self.retries.most = retries;
        self
    }

    /// No request is made again once it has taken so long; default 180 s. The request that is under way then may take 30 s
    /// more without an answer.
    ///
    /// # Source
    /// `RetryConfig` of the crate `object_store`.
    pub fn retry_timeout(mut self, time: Duration) -> Self {
        self.retries.timeout = time;
        self
    }
}

fn options() -> &'static RwLock<RemoteOptions> {
    static OPTIONS: OnceLock<RwLock<RemoteOptions>> = OnceLock::new();
    OPTIONS.get_or_init(RwLock::default)
}

/// Sets how remote files are read that are opened from now on, by the whole process. Those that are being read keep the
/// options they were opened with.
///
/// URLs stand where paths do: `s3://bucket/key`, `gs://`, `az://container/key`, `http://`, `https://`. Credentials and
/// endpoints are read from the environment, by the names of the crate `object_store`: `AWS_ACCESS_KEY_ID`,
/// `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION`, `AWS_ENDPOINT_URL`, `AWS_ALLOW_HTTP`,
/// `AWS_SKIP_SIGNATURE`; `GOOGLE_SERVICE_ACCOUNT`; `AZURE_STORAGE_ACCOUNT_NAME`, `AZURE_STORAGE_ACCOUNT_KEY`. On a machine
/// of the cloud its role is used.
///
/// # Errors
/// [`DataError::InvalidOption`] for a cache that holds less than 64 MiB, or that is a URL.
pub fn configure_remote(new: RemoteOptions) -> Result<(), DataError> {
    const LEAST: u64 = 64 << 20;
    if is_url(&new.cache) {
        return Err(DataError::option("cache", "a folder of this machine", new.cache.display()));
    }
    if new.cache_bytes < LEAST {
        return Err(DataError::option("cache_bytes", format!("{LEAST} or more"), new.cache_bytes));
    }
    *options().write().unwrap_or_else(PoisonError::into_inner) = new;
    close_unread();
    Ok(())
}

pub(super) fn current() -> RemoteOptions {
    options().read().unwrap_or_else(PoisonError::into_inner).clone()
}
