//! Files of object stores and web servers.
//!
//! A file is read in chunks. Each is fetched once, a few ahead of a reader that goes from front to back, and kept in a
//! cache on the disk, which all processes of the machine share. What is mapped into memory is fetched whole (`whole.rs`).

mod cache;
mod client;
mod fetch;
mod file;
mod known;
mod list;
mod object;
mod options;
mod stats;
mod store;
mod version;
mod whole;

use std::path::Path;

pub(crate) use file::{RemoteFile, read_ahead};
pub(crate) use known::{first_of, require};
pub(crate) use list::{below, matching};
pub use options::{RemoteOptions, configure_remote};
pub use stats::{RemoteStats, remote_stats};
pub(crate) use version::Version;
pub(crate) use whole::fetch_whole;

use crate::DataError;

/// The bytes of a chunk, but for the last one of a file.
const CHUNK: u64 = 4 << 20;

/// The URL that a path is. Paths that are not UTF-8 are none.
fn url(path: &Path) -> Result<&str, DataError> {
    path.to_str().ok_or_else(|| DataError::option("url", "UTF-8", path.display()))
}
