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
use crate::first;
use crate::folder::Folder;
use crate::layout::Layout;
use crate::manifest::{Metric, Rank};
use crate::names::check_names;
use crate::ranks::Ranks;
use crate::retention::{Best, Retention};
use crate::run::Run;
use crate::search::Passed;
use crate::stop::Stop;
use crate::write::{Body, Pending, PendingPart, remove_surplus, write};

/// The checkpoints of a run, in the run's own folder.
///
/// Parts are named when they are saved and when they are loaded; a part is anything [`Stateful`]. Tensors that share
/// their memory (tied weights) are written once, and loaded under each of their names.
pub struct Checkpoint {
    pub(crate) folder: Arc<Folder>,
    pub(crate) run: Run,
    /// Parts that differ by rank and are not loaded by another number of ranks.
    pub(crate) begin_anew: BTreeSet<String>,
    /// Parts that differ by rank, of which another number of ranks loads rank 0's.
    pub(crate) from_rank_0: BTreeSet<String>,
    retention: Retention,
    every: Option<u64>,
    background: bool,
    pub(crate) ranks: Ranks,
    stop: Stop,
    stopping: bool,
    pub(crate) fields: BTreeMap<String, Value>,
    /// What `read_fields` has passed over; `resume` does too.
    pub(crate) passed: Option<Passed>,
    writing: Option<Writing>,
    /// The memory of the last snapshot, by part, to be reused.
    buffers: BTreeMap<String, HostBuffer>,
    /// The step that was saved last or resumed from.
    last: Option<u64>,
    /// The step that the run has resumed from, until another one comes.
    resumed: Option<u64>,
    /// A step that is being written or is written here, but may be missing on other ranks.
    unconfirmed: Option<u64>,
    /// The last step that all ranks have.
    everywhere: Option<u64>,
    warnings: Vec<CheckpointError>,
}

/// A write in the background.
struct Writing {
    step: u64,
    thread: io::Result<JoinHandle<(Pending, Written)>>,
}

/// The result of a write: old checkpoints that could not be removed afterwards, or why it failed.
type Written = Result<Vec<CheckpointError>, CheckpointError>;

impl Writing {
    fn is_done(&self) -> bool {
        self.thread.as_ref().is_ok_and(JoinHandle::is_finished)
    }
}

impl Checkpoint {
    /// Options for checkpoints in `folder`.
    pub fn builder(folder: impl AsRef<Path>) -> CheckpointBuilder {
        CheckpointBuilder::new(folder.as_ref())
    }

    pub(crate) fn new(folder: Folder, options: CheckpointBuilder, stop: Stop) -> Self {
        Self {
            folder: Arc::new(folder),
            run: Run::new(&options.folder, options.ranks.writers_of_their_own()),
            begin_anew: options.begin_anew,
            from_rank_0: options.from_rank_0,
            retention: options.retention,
            every: options.every,
            background: options.background,
            ranks: options.ranks,
            stop,
            stopping: false,
            fields: BTreeMap::new(),
            passed: None,
            writing: None,
            buffers: BTreeMap::new(),
            last: None,
            resumed: None,
            unconfirmed: None,
            everywhere: None,
            warnings: Vec::new(),
        }
    }

    /// Whether to save after this step: every [`every`](CheckpointBuilder::every) steps, and when a signal or the time
    /// limit asks the run to stop. False at the step that the run has just resumed from, because that step is saved
    /// already.
    ///
    /// # Errors
    /// [`CheckpointError::Background`] when the last write has failed; with several ranks, `save` returns that instead.
    /// [`CheckpointError::Sync`] when a rank is gone.
    ///
    /// # Syncs
    /// No; with several ranks and `on_signal` or `stop_after`, waits for all ranks.
    pub fn due(&mut self, step: u64) -> Result<bool, CheckpointError> {
        if !self.ranks.are_several() && self.writing.as_ref().is_some_and(Writing::is_done) {
            self.join()?;
        }
        self.stopping |= self.stop.requested(step, &self.ranks)?;
        let is_due = self.stopping || self.every.is_some_and(|every| step > 0 && step.is_multiple_of(every));
        self.resumed = self.resumed.filter(|&resumed| resumed == step);
        Ok(is_due && self.resumed.is_none())
    }

    /// Whether to leave the loop, because a signal or the time limit asked for it before the last [`due`](Self::due),
    /// which then returned true unless the run had just resumed. The same on all ranks, whichever rank was asked.
    pub fn stop_requested(&self) -> bool {
        self.stopping
    }

    /// Saves the parts and the fields under this step, replacing an earlier checkpoint of the same step.
    ///
    /// In the background, this waits for the previous write, copies the state and returns; the next call of `due`,
    /// `save`, `wait` or `finish` returns an error of the write. An old checkpoint that could not be removed is not an
    /// error, but one of the [warnings](Self::take_warnings).
    ///
    /// # Errors
    /// When the state cannot be taken or copied; [`CheckpointError::Background`] when the previous write has failed,
    /// and then nothing is saved. With several ranks, also when one of these happens on another rank
    /// ([`CheckpointError::OtherRank`]), and [`CheckpointError::StepOrder`].
    ///
    /// # Syncs
    /// Yes: tensors on a device are copied to the host. Waits for all ranks.
    pub fn save(&mut self, step: u64, parts: &[(&str, &dyn Stateful)]) -> Result<(), CheckpointError> {
        let prepared = self.prepare(step, parts);
        let pending = match (self.metric(), self.together(&prepared), prepared) {
            (Ok(metric), Ok(ranks), Ok(pending)) => Ok(pending.map(|pending| Pending { metric, ranks, ..pending })),
            (_, _, Err(error)) | (Err(error), ..) | (_, Err(error), _) => Err(error),
        };
        let pending = self.confirm(&format!("save its checkpoint of step {step}"), pending)?;
        (self.last, self.unconfirmed, self.passed) = (Some(step), Some(step), None);
        match pending {
            Some(pending) if self.background => self.start(pending),
            None if self.background => {}
            pending => {
                let written = pending.map_or(Ok(()), |pending| write(&self.folder, &pending));
                self.confirm(&format!("write its checkpoint of step {step}"), written)?;
                self.remove_surplus();
            }
        }
        Ok(())
    }

    /// Returns this rank's result if all ranks succeeded; the previous write is then finished on all of them.
    fn confirm<T>(&mut self, action: &str, own: Result<T, CheckpointError>) -> Result<T, CheckpointError> {
        let unconfirmed = self.unconfirmed.take();
        let agreed = self.ranks.all(action, own)?;
        self.everywhere = unconfirmed.or(self.everywhere);
        Ok(agreed)
    }

    /// Prepares what this rank will write; none on a rank that does not write.
    fn prepare(&mut self, step: u64, parts: &[(&str, &dyn Stateful)]) -> Result<Option<Pending>, CheckpointError> {
        check_names(parts.iter().map(|(name, _)| *name))?;
        self.ranks.check_parts(parts.iter().copied())?;
        self.join()?;
        if step > i64::MAX as u64 {
            let (expected, found) = ("below 2^63", step.to_string());
            return Err(CheckpointError::InvalidOption { option: "step", expected, found });
        }
        let several = self.ranks.are_several();
        if let Some(last) = self.last.filter(|&last| several && step <= last) {
            return Err(CheckpointError::StepOrder { step, last });
        }
        if !self.ranks.writes() {
            return Ok(None);
        }
        if several {
            // Before any rank writes this step: otherwise, if a rank died meanwhile, its old checkpoint of this step
            // could be taken for one that matches the other ranks' new ones.
            let from = self.last.map_or(step, |last| last + 1);
            self.folder.abandon(from, None)?;
            if self.ranks.rank() == 0 {
                self.run.abandon_others(from)?;
            }
            if self.ranks.mark().is_some() {
                first::begin(&self.folder, step)?;
            }
        }
        let abandoned_from = self.last.map_or(step, |last| last.min(step)) + 1;
        let (fields, run) = (self.fields.clone(), (!several).then(|| self.run.clone()));
        let mut pending = Pending { step, abandoned_from, run, ranks: None, metric: None, parts: Vec::new(), fields };
        let names: BTreeSet<&str> = parts.iter().map(|(name, _)| *name).collect();
        self.buffers.retain(|name, _| names.contains(name.as_str()));
        for (name, part) in parts {
            let state = part.state_dict();
            let state = state.map_err(|error| CheckpointError::Part { part: (*name).to_owned(), error })?;
            let layout = Layout::of(name, &state)?;
            let (is_own, buffer) = (part.differs_by_rank(), self.buffers.remove(*name));
            pending.parts.push(PendingPart::new(name, layout, is_own, self.background, buffer)?);
        }
        Ok(Some(pending))
    }

    /// This rank's mark, with the number of what all ranks save together.
    fn together(&self, own: &Result<Option<Pending>, CheckpointError>) -> Result<Option<Rank>, CheckpointError> {
        let Some(mark) = self.ranks.mark() else { return Ok(None) };
        let digest = match own {
            Ok(Some(pending)) => pending.digest(mark.rank),
            _ => Ok(0),
        };
        let together = self.ranks.sum(*digest.as_ref().unwrap_or(&0))?;
        digest.map(|_| Some(Rank { together: together as u64, ..mark }))
    }

    /// The metric by which the best are kept.
    fn metric(&self) -> Result<Option<Metric>, CheckpointError> {
        let Some(Best { metric: name, .. }) = &self.retention.best else { return Ok(None) };
        let own = self.fields.get(name).and_then(Value::as_f64);
        let value = self.ranks.rank_0s(own)?;
        if value.is_none() {
            tracing::warn!("the field {name:?} is not a number, so this checkpoint is not among the best");
        }
        Ok(value.map(|value| Metric { name: name.clone(), value }))
    }

    /// Writes in the background.
    fn start(&mut self, pending: Pending) {
        let (folder, retention, step) = (self.folder.clone(), self.retention.clone(), pending.step);
        let run = self.run.clone();
        // Other ranks may not have this step yet.
        let upto = if self.ranks.are_several() { self.everywhere } else { Some(step) };
        let thread = thread::Builder::new().name("checkpoint".to_owned()).spawn(move || {
            let _span = tracing::debug_span!("checkpoint_write", step).entered();
            let written = write(&folder, &pending);
            let removed = |()| upto.map_or(Vec::new(), |upto| remove_surplus(&run, &folder, &retention, upto, step));
            (pending, written.map(removed))
        });
        self.writing = Some(Writing { step, thread });
    }

    /// Waits for the write in the background, if there is one; with several ranks, for every rank's.
    ///
    /// # Errors
    /// [`CheckpointError::Background`] when the write has failed.
    ///
    /// # Syncs
    /// Waits for all ranks.
    pub fn wait(&mut self) -> Result<(), CheckpointError> {
        let (own, news) = (self.join(), self.unconfirmed.is_some());
        self.confirm("write its last checkpoint", own)?;
        if news && self.ranks.are_several() {
            self.remove_surplus();
        }
        Ok(())
    }

    /// Removes surplus checkpoints, up to the last step that all ranks have.
    fn remove_surplus(&mut self) {
        if let Some(upto) = self.everywhere.filter(|_| self.ranks.writes()) {
            self.warnings.extend(remove_surplus(&self.run, &self.folder, &self.retention, upto, upto));
        }
    }

    /// Waits for this rank's own write.
    fn join(&mut self) -> Result<(), CheckpointError> {
        let Some(Writing { step, thread }) = self.writing.take() else { return Ok(()) };
        let failed = |error| Err(error).when("write to it", self.folder.root());
        let written = match thread.map(JoinHandle::join) {
            Ok(Ok((pending, written))) => {
                for part in pending.parts {
                    if let Body::Copied(buffer, _) = part.body {
                        self.buffers.insert(part.name, buffer);
                    }
                }
                written
            }
            Ok(Err(_)) => failed(io::Error::other("the thread panicked")),
            Err(error) => failed(error),
        };
        let warnings = written.map_err(|error| CheckpointError::Background { step, error: Box::new(error) })?;
        self.warnings.extend(warnings);
        Ok(())
    }

    /// Records that this run resumes at a step that all ranks have.
    pub(crate) fn resumed_at(&mut self, step: u64) {
        (self.last, self.unconfirmed, self.everywhere) = (Some(step), None, Some(step));
        self.resumed = Some(step);
    }

    /// Old checkpoints that could not be removed since the last call. They take disk space, and each save tries again
    /// to remove them; new checkpoints are not affected. They are also logged.
    pub fn take_warnings(&mut self) -> Vec<CheckpointError> {
        std::mem::take(&mut self.warnings)
    }

    /// Waits for the write in the background, and ends. Dropping a `Checkpoint` without this waits for this rank's
    /// write too, but only logs an error.
    ///
    /// # Errors
    /// Those of [`wait`](Self::wait).
    ///
    /// # Syncs
    /// Waits for all ranks.
    pub fn finish(mut self) -> Result<(), CheckpointError> {
        self.wait()
    }

    /// Sets a field, saved from the next checkpoint on: any value that serde can turn into JSON.
    ///
    /// # Errors
    /// [`CheckpointError::Field`]. JSON has no infinities and no NaN: they are saved as null, which loads as an
    /// `Option`'s `None`.
    pub fn set(&mut self, name: &str, value: &impl Serialize) -> Result<(), CheckpointError> {
        let value = serde_json::to_value(value);
        let value = value.map_err(|error| CheckpointError::Field { name: name.to_owned(), error })?;
        self.fields.insert(name.to_owned(), value);
        Ok(())
    }

    /// A field as it was loaded or set last; none if there is no such field.
    ///
    /// # Errors
    /// [`CheckpointError::Field`] for a field of another type.
    pub fn get<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, CheckpointError> {
        let value = self.fields.get(name).map(|value| T::deserialize(value));
        value.transpose().map_err(|error| CheckpointError::Field { name: name.to_owned(), error })
    }

    /// The steps of the existing checkpoints in this process's folder, in order.
    ///
    /// # Errors
    /// [`CheckpointError::Io`]
    pub fn steps(&self) -> Result<Vec<u64>, CheckpointError> {
        self.folder.steps()
    }

    /// The step of the best checkpoint by [`keep_best`](CheckpointBuilder::keep_best)'s metric, for
    /// [`load`](Self::load); none if no checkpoint has that metric. It may be one that another number of ranks has saved.
    ///
    /// # Errors
    /// [`CheckpointError::Io`]
    pub fn best(&self) -> Result<Option<u64>, CheckpointError> {
        let Some(best) = &self.retention.best else { return Ok(None) };
        let steps = self.run.steps(&self.folder)?;
        Ok(best.of(&self.run, &self.folder, &steps).first().copied())
    }

    /// The folder of a step's checkpoint, whether it exists or not.
    pub fn path(&self, step: u64) -> PathBuf {
        self.folder.step(step)
    }
}

impl Drop for Checkpoint {
    fn drop(&mut self) {
        // Does not wait for other ranks: they may not be here if this one leaves with an error.
        if let Err(error) = self.join() {
            tracing::error!("{error}");
        }
    }
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Checkpoint");
        debug.field("folder", &self.folder.root()).field("retention", &self.retention).field("every", &self.every);
        debug.field("ranks", &self.ranks);
        debug.field("writing", &self.writing.as_ref().map(|writing| writing.step)).finish_non_exhaustive()
    }
}
