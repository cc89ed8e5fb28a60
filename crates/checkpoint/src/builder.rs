//! Options of a [`Checkpoint`].

use std::path::{Path, PathBuf};

use crate::checkpoint::Checkpoint;
use crate::error::CheckpointError;
use crate::folder::Folder;

/// Options of a [`Checkpoint`], from [`Checkpoint::builder`].
#[derive(Clone, Debug)]
#[must_use = "nothing is watched or written before `build`"]
pub struct CheckpointBuilder {
    folder: PathBuf,
    pub(crate) keep: usize,
    pub(crate) every: Option<u64>,
    pub(crate) background: bool,
    #[cfg(feature = "signal")]
    on_signal: bool,
}

impl CheckpointBuilder {
    pub(crate) fn new(folder: &Path) -> Self {
        Self {
            folder: folder.to_path_buf(),
            keep: 3,
            every: None,
            background: true,
            #[cfg(feature = "signal")]
            on_signal: false,
        }
    }

    /// How many checkpoints to keep, those of the highest steps; 3 by default.
    pub fn keep(mut self, checkpoints: usize) -> Self {
        self.keep = checkpoints;
        self
    }

    /// After how many steps [`due`](Checkpoint::due) says so; never by default, but for signals.
    pub fn every(mut self, steps: u64) -> Self {
        self.every = Some(steps);
        self
    }

    /// Whether `save` copies the state and leaves the writing to a thread (the default), or writes it itself.
    ///
    /// In the background the copy takes as much host memory as the state, which is used again by the next save.
    pub fn background(mut self, background: bool) -> Self {
        self.background = background;
        self
    }

    /// Whether a first SIGTERM or Ctrl-C makes the next step [`due`](Checkpoint::due) and asks the run
    /// [to stop](Checkpoint::stop_requested); off by default. A second one ends the process at once.
    #[cfg(feature = "signal")]
    pub fn on_signal(mut self, on_signal: bool) -> Self {
        self.on_signal = on_signal;
        self
    }

    /// Makes the folder where there is none, removes what a crash has left of a write, and keeps other runs out of it.
    ///
    /// # Errors
    /// [`CheckpointError::InvalidOption`], [`InUse`](CheckpointError::InUse), [`Io`](CheckpointError::Io),
    /// [`Signals`](CheckpointError::Signals).
    pub fn build(self) -> Result<Checkpoint, CheckpointError> {
        let invalid = |option, expected, found: u64| {
            Err(CheckpointError::InvalidOption { option, expected, found: found.to_string() })
        };
        if self.keep == 0 {
            return invalid("keep", "at least 1", 0);
        }
        if self.every == Some(0) {
            return invalid("every", "at least 1", 0);
        }
        #[cfg(feature = "signal")]
        let watch = match self.on_signal {
            true => Some(crate::signal::Watch::new().map_err(|error| CheckpointError::Signals { error })?),
            false => None,
        };
        let folder = Folder::open(&self.folder)?;
        Ok(Checkpoint::new(
            folder,
            &self,
            #[cfg(feature = "signal")]
            watch,
        ))
    }
}
