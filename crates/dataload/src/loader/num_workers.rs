//! How many workers a loader has.

use crate::loader::tuner::{local_ranks, share_of_cores};

/// More threads than this are surely a mistake, and starting them could overload the machine.
pub(crate) const MAX_WORKERS: usize = 1024;

/// Lets the loader choose, from how long the training loop waits for data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Auto;

/// A number of worker threads, or [`Auto`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumWorkers {
    /// This many; 0 loads on the calling thread.
    Fixed(usize),
    /// Starts with one and adds workers for as long as that makes the training loop faster, up to this process's share
    /// of the cores: those that its CPU affinity and cgroup allow, divided by the ranks that the launcher started on
    /// the host (`LOCAL_WORLD_SIZE`).
    Auto,
}

impl From<usize> for NumWorkers {
    fn from(workers: usize) -> Self {
        Self::Fixed(workers)
    }
}

impl From<Auto> for NumWorkers {
    fn from(_: Auto) -> Self {
        Self::Auto
    }
}

impl NumWorkers {
    /// The number to begin with, and the most.
    pub(crate) fn bounds(self) -> (usize, usize) {
        match self {
            Self::Fixed(workers) => (workers, workers),
            Self::Auto => (1, own_cores().min(MAX_WORKERS)),
        }
    }
}

/// This process's share of the host's cores.
fn own_cores() -> usize {
    // Respects CPU affinity and cgroups.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    share_of_cores(cores, local_ranks(|name| std::env::var(name).ok()))
}
