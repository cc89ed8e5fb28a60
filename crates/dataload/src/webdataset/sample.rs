//! One sample: a key, and the files that share it.

use std::path::Path;
use std::sync::Arc;

/// The files of a tar shard that share a name up to the first dot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebSample {
    pub(super) key: Arc<str>,
    pub(super) shard: Arc<Path>,
    pub(super) files: Vec<(String, Vec<u8>)>,
}

impl WebSample {
    /// The common part of the files' names, folders included: `train/0001` for `train/0001.seg.png`.
    #[doc(alias = "__key__")]
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The shard that contains the sample.
    #[doc(alias = "__url__")]
    pub fn shard(&self) -> &Path {
        &self.shard
    }

    /// The content of the file with this extension, in lower case and without the first dot: `jpg`, `seg.png`.
    pub fn get(&self, extension: &str) -> Option<&[u8]> {
        self.files.iter().find(|(name, _)| name == extension).map(|(_, bytes)| &**bytes)
    }

    /// Removes a file from the sample and returns its bytes, without a copy.
    pub fn take(&mut self, extension: &str) -> Option<Vec<u8>> {
        let position = self.files.iter().position(|(name, _)| name == extension)?;
        Some(self.files.remove(position).1)
    }

    /// Every file as (extension, content), in the shard's order.
    pub fn files(&self) -> impl ExactSizeIterator<Item = (&str, &[u8])> {
        self.files.iter().map(|(extension, bytes)| (&**extension, &**bytes))
    }

    /// Every file, owned.
    pub fn into_files(self) -> Vec<(String, Vec<u8>)> {
        self.files
    }
}
