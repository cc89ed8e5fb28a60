//! Options of a [`Checkpoint`].

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use overdrive_core::RankGroup;

use crate::checkpoint::Checkpoint;
use crate::error::CheckpointError;
use crate::folder::Folder;
use crate::ranks::{Ranks, Writers};
use crate::retention::{Best, Goal, Retention};
use crate::stop::Stop;

/// Options of a [`Checkpoint`], from [`Checkpoint::builder`].
#[derive(Clone, Debug)]
#[must_use = "options do nothing until `build`"]
pub struct CheckpointBuilder {
    pub(crate) folder: PathBuf,
    pub(crate) begin_anew: BTreeSet<String>,
    pub(crate) from_rank_0: BTreeSet<String>,
    pub(crate) retention: Retention,
    pub(crate) every: Option<u64>,
    pub(crate) background: bool,
    pub(crate) ranks: Ranks,
    stop_after: Option<Duration>,
    agree_every: u64,
    #[cfg(feature = "signal")]
    on_signal: bool,
}

impl CheckpointBuilder {
    pub(crate) fn new(folder: &Path) -> Self {
        Self {
            folder: folder.to_path_buf(),
            begin_anew: BTreeSet::new(),
            from_rank_0: BTreeSet::new(),
            retention: Retention { newest: 3, best: None },
            every: None,
            background: true,
            ranks: Ranks::default(),
            stop_after: None,
            agree_every: 1,
            #[cfg(feature = "signal")]
            on_signal: false,
        }
    }

    /// How many checkpoints to keep, those of the highest steps; default 3.
    pub fn keep(mut self, checkpoints: usize) -> Self {
        self.retention.newest = checkpoints;
        self
    }

    /// How many checkpoints to keep for their `metric`, a [field](Checkpoint::set) that you set to a number before
    /// saving: those with the best metric are kept even when they are no longer among the newest. A checkpoint without
    /// the metric is never among the best; of equal ones, the earlier is better. With several ranks, rank 0's metric
    /// counts.
    pub fn keep_best(mut self, checkpoints: usize, metric: impl Into<String>, goal: Goal) -> Self {
        self.retention.best = Some(Best { count: checkpoints, metric: metric.into(), goal });
        self
    }

    /// Every how many steps [`due`](Checkpoint::due) is true. By default it is true only when the run has to stop.
    pub fn every(mut self, steps: u64) -> Self {
        self.every = Some(steps);
        self
    }

    /// Sets whether `save` copies the state and a thread writes it (the default), or `save` itself writes it before it
    /// returns.
    ///
    /// In the background, the copy takes as much host memory as the state; the next save reuses it.
    pub fn background(mut self, background: bool) -> Self {
        self.background = background;
        self
    }

    /// The ranks that train together (a process group, say), and which of them write. All must have the same options
    /// and make the same calls in the same order: `build`, `resume`, `load`, `due`, `save`, `wait` and `finish` wait
    /// for all ranks.
    ///
    /// All ranks resume at the same step, the newest that all have undamaged, and stop at the same step. A failure on
    /// one rank is an error on all. Steps must increase: a checkpoint cannot be replaced. A rank removes old
    /// checkpoints only when all ranks have the newer one, so for a while there is one more than `keep`.
    pub fn ranks(mut self, group: impl RankGroup + 'static, writers: Writers) -> Self {
        self.ranks = Ranks::new(Arc::new(group), writers);
        self
    }

    /// Parts of which each rank saves its own state, such as random generators, and that keep the state they have where
    /// another number of ranks resumes than has saved ([`Resumed::left_out`](crate::Resumed::left_out)). Without this,
    /// such a run is refused.
    pub fn begin_anew(mut self, parts: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.begin_anew.extend(parts.into_iter().map(Into::into));
        self
    }

    /// Parts of which ranks save different states that are no shards, and of which rank 0's is right for another number of
    /// ranks: a module whose batch norms have each rank's running statistics, say, of which `DistributedDataParallel` takes
    /// rank 0's in each pass; or the buffers of a sharded one. Without this, such a run is refused
    /// ([`CheckpointError::RanksDiffer`]). As many ranks load their own.
    ///
    /// # Source
    /// `torch.distributed.checkpoint`, which saves what is not sharded from one rank alone
    pub fn from_rank_0(mut self, parts: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.from_rank_0.extend(parts.into_iter().map(Into::into));
        self
    }

    /// Every how many steps the ranks agree on whether to stop, if `on_signal` or `stop_after` is set; default 1. On a
    /// GPU, agreeing waits for the device: if steps are short, agree every 20th, say.
    pub fn agree_every(mut self, steps: u64) -> Self {
        self.agree_every = steps;
        self
    }

    /// For how long to train, counted from `build`: the first step after that is [`due`](Checkpoint::due), and
    /// [`stop_requested`](Checkpoint::stop_requested) is true. For machines with a time limit.
    pub fn stop_after(mut self, time: Duration) -> Self {
        self.stop_after = Some(time);
        self
    }

    /// Sets whether the first SIGTERM or Ctrl-C makes the next step [`due`](Checkpoint::due) and
    /// [`stop_requested`](Checkpoint::stop_requested) true; default false. A second one ends the process at once.
    #[cfg(feature = "signal")]
    pub fn on_signal(mut self, on_signal: bool) -> Self {
        self.on_signal = on_signal;
        self
    }

    /// Creates the folder if needed, removes the remains of writes that crashed, and locks other runs out of it.
    ///
    /// # Errors
    /// [`CheckpointError::InvalidOption`], [`InUse`](CheckpointError::InUse), [`Io`](CheckpointError::Io),
    /// [`Signals`](CheckpointError::Signals); with several ranks [`OtherRank`](CheckpointError::OtherRank) and
    /// [`Sync`](CheckpointError::Sync).
    ///
    /// # Syncs
    /// Waits for all ranks.
    pub fn build(self) -> Result<Checkpoint, CheckpointError> {
        let (folder, stop) = self.ranks.all("open its folder of checkpoints", self.open())?;
        Ok(Checkpoint::new(folder, self, stop))
    }

    fn open(&self) -> Result<(Folder, Stop), CheckpointError> {
        let best = self.retention.best.as_ref().map_or(1, |best| best.count as u64);
        let counts = [
            ("keep", self.retention.newest as u64),
            ("keep_best", best),
            ("every", self.every.unwrap_or(1)),
            ("agree_every", self.agree_every),
        ];
        if let Some((option, _)) = counts.into_iter().find(|(_, count)| *count == 0) {
            return Err(CheckpointError::InvalidOption { option, expected: "at least 1", found: "0".to_owned() });
        }
        let stop = Stop {
            // A time beyond the clock's range is never reached.
            at: self.stop_after.and_then(|time| Instant::now().checked_add(time)),
            agree_every: self.agree_every,
            #[cfg(feature = "signal")]
            watch: match self.on_signal {
                true => Some(crate::signal::Watch::new().map_err(|error| CheckpointError::Signals { error })?),
                false => None,
            },
        };
        let root = self.ranks.folder(&self.folder);
        let folder = if self.ranks.writes() { Folder::open(&root)? } else { Folder::reading(&root) };
        Ok((folder, stop))
    }
}
