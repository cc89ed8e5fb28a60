//! Optimizer state in files.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use overdrive_core::TorchError;
use overdrive_ffi::host_memory::{in_files, open_folder};

use crate::error::MemoryError;

/// The folder for an optimizer's state.
#[derive(Debug)]
pub(super) struct OnDisk(File);

impl OnDisk {
    pub(super) fn open(folder: &Path) -> Result<Self, MemoryError> {
        let failed = |source| MemoryError::Disk { path: folder.to_owned(), source: Arc::new(source) };
        open_folder(folder).map(Self).map_err(failed)
    }

    /// What `work` makes is in files.
    pub(super) fn make<T>(&self, work: impl FnOnce() -> T) -> Result<T, TorchError> {
        in_files(&self.0, work)
    }
}
