//! A thread that does one thing after the other.

use std::io;
use std::sync::mpsc::{Sender, channel};
use std::thread;

type Job = Box<dyn FnOnce() + Send>;

/// A thread, which ends when this is dropped and its jobs are done.
pub(super) struct Worker(Sender<Job>);

impl Worker {
    pub(super) fn start(name: &str) -> io::Result<Self> {
        let (sender, jobs) = channel::<Job>();
        thread::Builder::new().name(name.to_owned()).spawn(move || jobs.into_iter().for_each(|job| job()))?;
        Ok(Self(sender))
    }

    pub(super) fn run(&self, job: impl FnOnce() + Send + 'static) {
        // The thread runs as long as this sender lives, and its jobs do not panic.
        let _ = self.0.send(Box::new(job));
    }
}
