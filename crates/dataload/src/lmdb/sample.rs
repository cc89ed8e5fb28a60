//! One entry.

use std::fmt;
use std::sync::Arc;

use super::keys::Keys;

/// A key and its value.
#[derive(Clone)]
pub struct LmdbSample {
    pub(super) keys: Arc<Keys>,
    pub(super) index: usize,
    pub(super) value: Vec<u8>,
}

impl LmdbSample {
    /// The entry's key.
    pub fn key(&self) -> &[u8] {
        self.keys.get(self.index).unwrap_or_default()
    }

    /// The entry's value.
    pub fn value(&self) -> &[u8] {
        &self.value
    }

    /// The entry's value, owned.
    pub fn into_value(self) -> Vec<u8> {
        self.value
    }
}

impl fmt::Debug for LmdbSample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LmdbSample {{ key: \"{}\", bytes: {} }}", self.key().escape_ascii(), self.value.len())
    }
}
