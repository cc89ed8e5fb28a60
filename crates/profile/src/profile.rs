//! What a window of the profiler recorded.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use overdrive_ffi::profiler::{Recorded, Scope};

use crate::ProfileError;
use crate::events::{self, Averages, EventList, FunctionEventAvg, Grouping, Recording, TableOptions};
use crate::trace::{self, MemoryTimeline, ThreadNames, TraceFile, TraceWriter};

/// What the profiler recorded in one window.
///
/// It owns its data and is `Send`, so that tables and files can be made on another thread while training continues.
/// Events are parsed when they are first needed.
///
/// # Source
/// `torch.profiler.profile`, after it has stopped
#[derive(Debug)]
pub struct Profile {
    file: TraceFile,
    scopes: Vec<Scope>,
    scopes_lost: u64,
    threads: ThreadNames,
    start_ns: i64,
    steps: RangeInclusive<u64>,
    recording: Recording,
    events: OnceLock<EventList>,
    /// The previous profile, if events accumulate.
    earlier: Option<Arc<Profile>>,
}

impl Profile {
    pub(crate) fn new(
        recorded: Recorded,
        steps: RangeInclusive<u64>,
        recording: Recording,
        earlier: Option<Arc<Self>>,
    ) -> Result<Self, ProfileError> {
        let start_ns = recorded.trace.start_ns()?;
        if recorded.scopes_lost > 0 {
            tracing::warn!(
                lost = recorded.scopes_lost,
                "too many scopes of other threads for one window of the profiler"
            );
        }
        Ok(Self {
            file: TraceFile::new(recorded.trace),
            scopes: recorded.scopes,
            scopes_lost: recorded.scopes_lost,
            threads: ThreadNames::read(start_ns.saturating_add(recorded.length_ns)),
            start_ns,
            steps,
            recording,
            events: OnceLock::new(),
            earlier,
        })
    }

    /// The first and the last recorded step; the last may be unfinished.
    pub fn steps(&self) -> RangeInclusive<u64> {
        self.steps.clone()
    }

    /// When the profile began, in nanoseconds since the Unix epoch.
    pub fn start_ns(&self) -> i64 {
        self.start_ns
    }

    /// Scopes of other threads that were left out because there were more than a million.
    pub fn scopes_lost(&self) -> u64 {
        self.scopes_lost
    }

    /// All events by start time; with `acc_events`, followed by those of earlier profiles.
    ///
    /// # Errors
    /// When the host runs out of memory.
    ///
    /// # Source
    /// `torch.profiler.profile.events`
    pub fn events(&self) -> Result<&EventList, ProfileError> {
        if let Some(events) = self.events.get() {
            return Ok(events);
        }
        let recorded = self.file.trace().events()?;
        let mut events = events::parse(&recorded, &self.scopes, self.start_ns, self.recording);
        if let Some(earlier) = &self.earlier {
            events.append(earlier.events()?);
        }
        Ok(self.events.get_or_init(|| events))
    }

    /// Sums over events of the same name, or of the same name and input shapes.
    ///
    /// # Errors
    /// As for [`Profile::events`].
    ///
    /// # Source
    /// `torch.profiler.profile.key_averages`
    pub fn key_averages(&self, group_by_input_shape: bool) -> Result<Averages, ProfileError> {
        let grouping = Grouping { input_shapes: group_by_input_shape, ..Grouping::default() };
        Ok(self.events()?.key_averages(grouping))
    }

    /// Sums over all events, under the name `Total`.
    ///
    /// # Errors
    /// As for [`Profile::events`].
    ///
    /// # Source
    /// `torch.autograd.profiler.profile.total_average`
    pub fn total_average(&self) -> Result<FunctionEventAvg, ProfileError> {
        Ok(self.events()?.total_average())
    }

    /// PyTorch's table of the sums by name.
    ///
    /// # Errors
    /// As for [`Profile::events`].
    pub fn table(&self, options: &TableOptions) -> Result<String, ProfileError> {
        Ok(self.key_averages(false)?.table(options))
    }

    /// Writes the trace for Perfetto, `chrome://tracing` and TensorBoard; compressed if the name ends in `.gz`.
    ///
    /// The file appears when it is complete. The trace can be written any number of times. With CUDA, the end of a
    /// later profile waits while a trace is written.
    ///
    /// # Errors
    /// When the file cannot be written, or something other than a regular file is there; links are followed. The
    /// profile can still be written elsewhere, unless the error is [`ProfileError::Incomplete`].
    ///
    /// # Source
    /// `torch.profiler.profile.export_chrome_trace`
    pub fn export_chrome_trace(&self, path: impl AsRef<Path>) -> Result<(), ProfileError> {
        self.file.export(path.as_ref(), &self.scopes, &self.threads)
    }

    /// [`Profile::export_chrome_trace`] on a background thread.
    ///
    /// # Errors
    /// When the thread cannot be started. [`TraceWriter::wait`] returns the errors of writing.
    pub fn export_chrome_trace_in_background(
        self: &Arc<Self>,
        path: impl AsRef<Path>,
    ) -> Result<TraceWriter, ProfileError> {
        let profile = self.clone();
        TraceWriter::start(path.as_ref(), move |path| profile.export_chrome_trace(path))
    }

    /// Memory in use over time by device; empty unless the profiler recorded memory.
    ///
    /// # Errors
    /// When the host runs out of memory.
    pub fn memory_timeline(&self) -> Result<Vec<MemoryTimeline>, ProfileError> {
        let recorded = self.file.trace().events()?;
        Ok(trace::timelines(events::memory_changes(&recorded, self.start_ns)))
    }

    /// Writes the memory in use over time as JSON, or as CSV if the name ends in `.csv`; compressed if it ends in
    /// `.gz`.
    ///
    /// # Errors
    /// When the file cannot be written.
    ///
    /// # Source
    /// `torch.profiler.profile.export_memory_timeline`, which PyTorch has deprecated; without its guess of what each
    /// piece of memory is used for
    pub fn export_memory_timeline(&self, path: impl Into<PathBuf>) -> Result<(), ProfileError> {
        trace::export(&self.memory_timeline()?, &path.into())
    }
}
