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
use std::sync::Arc;

pub(crate) use file::{RemoteFile, read_ahead};
pub(crate) use known::{first_of, require};
pub(crate) use list::{below, matching};
pub use options::{RemoteOptions, configure_remote};
pub use stats::{RemoteStats, remote_stats};
pub(crate) use version::Version;
pub(crate) use whole::Whole;

use crate::DataError;

/// The bytes of a chunk, but for the last one of a file.
const CHUNK: u64 = 4 << 20;

/// The URL that a path is. Paths that are not UTF-8 are none.
fn url(path: &Path) -> Result<&str, DataError> {
    path.to_str().ok_or_else(|| DataError::option("url", "UTF-8", path.display()))
}

/// As long as the result lives, the URL of a file that was opened just now stands for that version, and opening it asks
/// nothing.
pub(crate) fn pin(path: &Path) -> Result<Arc<Version>, DataError> {
    let text = url(path)?;
    Ok(known::pin(text, object::Object::version_of(text)?))
}
