//! The checkpoints of a run.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use overdrive_core::Stateful;
use overdrive_ffi::HostBuffer;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::builder::CheckpointBuilder;
use crate::error::{CheckpointError, Context};
use crate::folder::Folder;
use crate::layout::Layout;
use crate::load::{check_names, load_all};
use crate::read::read;
use crate::write::{Body, Pending, PendingPart, write};

/// The checkpoints of a run, in a folder of its own.
///
/// Parts are named where they are saved and where they are loaded; each is anything [`Stateful`]. Tensors that share
/// their memory (tied weights) are written under each of their names, and stay tied when they are loaded, because
/// loading copies into the tensors that are there.
pub struct Checkpoint {
    folder: Arc<Folder>,
    keep: usize,
    every: Option<u64>,
    background: bool,
    fields: BTreeMap<String, Value>,
    writing: Option<Writing>,
    /// Memory of the last snapshot, by part.
    buffers: BTreeMap<String, HostBuffer>,
    stopping: bool,
    #[cfg(feature = "signal")]
    watch: Option<crate::signal::Watch>,
}

/// A write in the background.
struct Writing {
    step: u64,
    thread: JoinHandle<(Pending, Result<(), CheckpointError>)>,
}

/// What [`Checkpoint::resume`] has found.
#[derive(Debug)]
#[non_exhaustive]
pub struct Resumed {
    /// The step that it was saved at.
    pub step: u64,
    /// The checkpoint's folder.
    pub folder: PathBuf,
    /// Why newer ones could not be used; they lie beside it as `damaged-step-N` now.
    pub skipped: Vec<CheckpointError>,
}

impl Checkpoint {
    /// Options for checkpoints in `folder`.
    pub fn builder(folder: impl AsRef<Path>) -> CheckpointBuilder {
        CheckpointBuilder::new(folder.as_ref())
    }

    pub(crate) fn new(
        folder: Folder,
        options: &CheckpointBuilder,
        #[cfg(feature = "signal")] watch: Option<crate::signal::Watch>,
    ) -> Self {
        Self {
            folder: Arc::new(folder),
            keep: options.keep,
            every: options.every,
            background: options.background,
            fields: BTreeMap::new(),
            writing: None,
            buffers: BTreeMap::new(),
            stopping: false,
            #[cfg(feature = "signal")]
            watch,
        }
    }

    /// Loads the newest checkpoint into the parts, which are to be all of its parts; none when there is none yet.
    ///
    /// A damaged one is passed over with a warning, and the one before is loaded. Everything is read and its checksums
    /// compared before any part changes; a part that refuses leaves all as they were.
    ///
    /// # Errors
    /// When what is there does not fit the parts or is of a newer format, and when every checkpoint is damaged.
    ///
    /// # Syncs
    /// As the parts' `load_state_dict` do.
    pub fn resume(&mut self, parts: &mut [(&str, &mut dyn Stateful)]) -> Result<Option<Resumed>, CheckpointError> {
        self.wait()?;
        let mut skipped = Vec::new();
        let mut damaged = Vec::new();
        for step in self.steps()?.into_iter().rev() {
            let folder = self.folder.step(step);
            match read(&folder, Some(step)) {
                Ok(saved) => {
                    self.fields = load_all(saved, parts, true)?.fields;
                    for step in damaged {
                        self.folder.set_damaged_aside(step)?;
                    }
                    return Ok(Some(Resumed { step, folder, skipped }));
                }
                Err(error) if error.is_damage() => {
                    tracing::warn!("{error}; trying the checkpoint before");
                    skipped.push(error);
                    damaged.push(step);
                }
                Err(error) => return Err(error),
            }
        }
        match skipped.into_iter().next() {
            Some(error) => Err(error),
            None => Ok(None),
        }
    }

    /// Loads the checkpoint of one step, as [`resume`](Self::resume) does the newest.
    ///
    /// Those of later steps stay, count for `keep`, and are what `resume` takes: move them away when the run is to go on
    /// from here.
    ///
    /// # Errors
    /// [`CheckpointError::NoSuchStep`], or as for [`resume`](Self::resume); damage is an error here.
    ///
    /// # Syncs
    /// As the parts' `load_state_dict` do.
    pub fn load(&mut self, step: u64, parts: &mut [(&str, &mut dyn Stateful)]) -> Result<(), CheckpointError> {
        self.wait()?;
        let found = self.steps()?;
        if !found.contains(&step) {
            return Err(CheckpointError::NoSuchStep { folder: self.folder.root().to_path_buf(), step, found });
        }
        self.fields = load_all(read(&self.folder.step(step), Some(step))?, parts, true)?.fields;
        Ok(())
    }

    /// Whether to save behind this step: after every so many, and when a signal has asked the run to stop.
    ///
    /// # Errors
    /// [`CheckpointError::Background`] when the last write has failed meanwhile.
    ///
    /// # Syncs
    /// No.
    pub fn due(&mut self, step: u64) -> Result<bool, CheckpointError> {
        if self.writing.as_ref().is_some_and(|writing| writing.thread.is_finished()) {
            self.wait()?;
        }
        #[cfg(feature = "signal")]
        {
            self.stopping |= self.watch.as_ref().is_some_and(crate::signal::Watch::stop_requested);
        }
        Ok(self.stopping || self.every.is_some_and(|every| step > 0 && step.is_multiple_of(every)))
    }

    /// Whether to leave the loop: a signal came before the last [`due`](Self::due), which therefore said yes.
    pub fn stop_requested(&self) -> bool {
        self.stopping
    }

    /// Saves the parts and the fields under this step, in the place of what may have been saved under it before.
    ///
    /// In the background, this waits for the write before, copies the state and returns; an error of the write is
    /// raised by the next call of `due`, `save`, `wait` or `finish`.
    ///
    /// # Errors
    /// When the state cannot be taken or copied; [`CheckpointError::Background`] when the write before has failed, and
    /// then nothing is saved.
    ///
    /// # Syncs
    /// Yes: tensors of a device are copied to the host.
    pub fn save(&mut self, step: u64, parts: &[(&str, &dyn Stateful)]) -> Result<(), CheckpointError> {
        check_names(parts.iter().map(|(name, _)| *name))?;
        self.wait()?;
        let mut pending = Pending { step, parts: Vec::new(), fields: self.fields.clone() };
        let names: BTreeSet<&str> = parts.iter().map(|(name, _)| *name).collect();
        self.buffers.retain(|name, _| names.contains(name.as_str()));
        for (name, part) in parts {
            let state = part.state_dict();
            let state = state.map_err(|error| CheckpointError::Part { part: (*name).to_owned(), error })?;
            let layout = Layout::of(name, &state)?;
            pending.parts.push(match self.background {
                true => PendingPart::copied(name, layout, self.buffers.remove(*name))?,
                false => PendingPart::live(name, layout),
            });
        }
        if !self.background {
            return write(&self.folder, &pending, self.keep);
        }
        let (folder, keep) = (self.folder.clone(), self.keep);
        let thread = thread::Builder::new().name("checkpoint".to_owned()).spawn(move || {
            let _span = tracing::debug_span!("checkpoint_write", step).entered();
            let written = write(&folder, &pending, keep);
            (pending, written)
        });
        let thread = thread.when("start a thread to write to it", self.folder.root())?;
        self.writing = Some(Writing { step, thread });
        Ok(())
    }

    /// Waits for the write in the background, if there is one.
    ///
    /// # Errors
    /// [`CheckpointError::Background`] when it has failed.
    pub fn wait(&mut self) -> Result<(), CheckpointError> {
        let Some(Writing { step, thread }) = self.writing.take() else { return Ok(()) };
        let written = match thread.join() {
            Ok((pending, written)) => {
                for part in pending.parts {
                    if let Body::Copied(buffer, _) = part.body {
                        self.buffers.insert(part.name, buffer);
                    }
                }
                written
            }
            Err(_) => Err(io::Error::other("the thread panicked")).when("write to it", self.folder.root()),
        };
        written.map_err(|error| CheckpointError::Background { step, error: Box::new(error) })
    }

    /// Waits for the write in the background, and ends. What is dropped without this waits as well, but only logs an
    /// error.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn finish(mut self) -> Result<(), CheckpointError> {
        self.wait()
    }

    /// Sets a field of your own, saved from the next checkpoint on: anything that serde makes JSON of.
    ///
    /// # Errors
    /// [`CheckpointError::Field`]. JSON has no infinities and no NaN: they come back as null, to an `Option`.
    pub fn set(&mut self, name: &str, value: &impl Serialize) -> Result<(), CheckpointError> {
        let value = serde_json::to_value(value);
        let value = value.map_err(|error| CheckpointError::Field { name: name.to_owned(), error })?;
        self.fields.insert(name.to_owned(), value);
        Ok(())
    }

    /// A field of your own, as it was loaded or set last; none where there is none.
    ///
    /// # Errors
    /// [`CheckpointError::Field`] for a field of another type.
    pub fn get<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, CheckpointError> {
        let value = self.fields.get(name).map(|value| T::deserialize(value));
        value.transpose().map_err(|error| CheckpointError::Field { name: name.to_owned(), error })
    }

    /// The steps of the checkpoints that are there, in order.
    ///
    /// # Errors
    /// [`CheckpointError::Io`]
    pub fn steps(&self) -> Result<Vec<u64>, CheckpointError> {
        self.folder.steps()
    }

    /// Where the checkpoint of a step lies, or would.
    pub fn path(&self, step: u64) -> PathBuf {
        self.folder.step(step)
    }
}

impl Drop for Checkpoint {
    fn drop(&mut self) {
        if let Err(error) = self.wait() {
            tracing::error!("{error}");
        }
    }
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Checkpoint");
        debug.field("folder", &self.folder.root()).field("keep", &self.keep).field("every", &self.every);
        debug.field("writing", &self.writing.as_ref().map(|writing| writing.step)).finish_non_exhaustive()
    }
}
