//! Checks that many parts make, each with one text.

use std::path::Path;

use crate::DataError;

impl DataError {
    /// Refuses 0 for an option.
    pub(crate) fn at_least_1<N: Default + PartialEq>(option: &'static str, value: N) -> Result<(), Self> {
        if value == N::default() { Err(Self::option(option, "at least 1", 0)) } else { Ok(()) }
    }

    /// Refuses an index that is not below `len`.
    pub(crate) fn check_index(index: usize, len: usize) -> Result<(), Self> {
        if index < len { Ok(()) } else { Err(Self::IndexOutOfRange { index, len }) }
    }

    /// Refuses what takes more bytes than it may.
    pub(crate) fn check_bytes(limit: u64, bytes: u64, what: &'static str, path: &Path) -> Result<(), Self> {
        let path = || path.to_owned();
        if bytes <= limit { Ok(()) } else { Err(Self::TooLarge { path: path(), what, bytes, limit }) }
    }
}
