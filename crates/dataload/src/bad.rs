//! Errors of one item of a shard, after which others may follow.

use crate::DataError;

/// An error in the place of an item, and whether items follow it.
pub(crate) struct Bad {
    pub(crate) error: DataError,
    pub(crate) more: bool,
}

impl From<DataError> for Bad {
    fn from(error: DataError) -> Self {
        Self { error, more: false }
    }
}

/// Adds to what was found that a part of the content is lost.
pub(crate) fn noting(mut error: DataError, note: &str) -> DataError {
    if let DataError::Corrupt { found, .. } = &mut error {
        *found = format!("{found}; {note}");
    }
    error
}
