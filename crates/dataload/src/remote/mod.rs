//! Files of object stores and web servers.
//!
//! A file is read in chunks. Each is fetched once, a few ahead of a reader that goes from front to back, and kept in a
//! cache on the disk, which all processes of the machine share.

mod cache;
mod fetch;
mod list;
mod object;
mod options;
mod store;

use std::path::Path;

pub(crate) use list::matching;
pub(crate) use object::{RemoteFile, read_ahead};
pub use options::{RemoteOptions, configure_remote};
pub(crate) use store::require;

use crate::DataError;

/// The bytes of a chunk, but for the last one of a file.
const CHUNK: u64 = 4 << 20;

/// The URL that a path is. Paths that are not UTF-8 are none.
fn url(path: &Path) -> Result<&str, DataError> {
    path.to_str().ok_or_else(|| DataError::option("url", "UTF-8", path.display()))
}
