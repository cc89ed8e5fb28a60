//! Optimizer state in files.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use overdrive_core::{Optimizer, OptimizerError, TorchError};
use overdrive_ffi::host_memory::in_files;

use crate::error::MemoryError;

/// Where an optimizer's state is.
#[derive(Debug)]
pub(super) struct OnDisk {
    folder: File,
    /// Which parameters have been stepped: they have their state.
    stepped: Vec<bool>,
}

impl OnDisk {
    pub(super) fn open(folder: &Path) -> Result<Self, MemoryError> {
        let failed = |source| MemoryError::Disk { path: folder.to_owned(), source: Arc::new(source) };
        let opened = File::open(folder).map_err(failed)?;
        if !opened.metadata().map_err(failed)?.is_dir() {
            return Err(failed(std::io::ErrorKind::NotADirectory.into()));
        }
        Ok(Self { folder: opened, stepped: Vec::new() })
    }

    /// What `work` makes is in files.
    pub(super) fn make<T>(&self, work: impl FnOnce() -> T) -> Result<T, TorchError> {
        in_files(&self.folder, work)
    }

    /// A step. Only where it makes state, because its temporaries are in files then, too.
    pub(super) fn step(&mut self, optimizer: &mut impl Optimizer) -> Result<(), OptimizerError> {
        let has_grad: Vec<_> = optimizer.params().iter().map(|param| param.grad().defined()).collect();
        self.stepped.resize(has_grad.len(), false);
        if has_grad.iter().zip(&self.stepped).all(|(has, stepped)| *stepped || !has) {
            return optimizer.step();
        }
        self.make(|| optimizer.step())??;
        self.stepped.iter_mut().zip(has_grad).for_each(|(stepped, has)| *stepped |= has);
        Ok(())
    }
}
