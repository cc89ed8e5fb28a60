//! What does not change between attempts, and the events that a host waits for.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Instant;

use crate::error_file;
use crate::health::Health;
use crate::numa::Binding;
use crate::output::Console;
use crate::plan::Plan;
use crate::rendezvous::FromNodeZero;

/// What the guard waits for.
pub enum Event {
    Signal(i32),
    LauncherGone,
    NodeZero(FromNodeZero),
}

pub struct Host {
    pub plan: Plan,
    pub name: String,
    pub console: Arc<Console>,
    /// The folder of this run's files.
    pub logs: Option<PathBuf>,
    /// The folder of the ranks' error files if there is none for logs.
    pub errors: Option<error_file::Folder>,
    /// `OMP_NUM_THREADS` of each local rank; empty if it is not set here.
    pub threads: Vec<usize>,
    /// The CPUs of each local rank; empty if they are not bound.
    pub bindings: Vec<Binding>,
    pub health: Arc<Health>,
    pub events: Receiver<Event>,
}

/// The name of the guard's own loop in health checks.
const LOOP: &str = "launcher";

impl Host {
    /// The loop of this host goes on.
    pub fn beat(&self) {
        self.health.beat(LOOP);
    }

    /// Waits for the next event, until a time if one is given.
    pub fn next_event(&self, until: Option<Instant>) -> Result<Event, RecvTimeoutError> {
        let longest = self.plan.longest_wait();
        loop {
            self.beat();
            let left = until.map(|at| at.saturating_duration_since(Instant::now()));
            match self.events.recv_timeout(left.map_or(longest, |left| left.min(longest))) {
                Err(RecvTimeoutError::Timeout) if left.is_none_or(|left| left > longest) => {}
                other => return other,
            }
        }
    }
}
