//! Forwards signals from the launcher to the guard.

use std::process::Child;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread::{self, JoinHandle};

use rustix::process::{Pid, kill_process};
use signal_hook::iterator::{Handle, Signals};

use crate::signals;

/// A thread that forwards signals to the guard.
pub struct Forwarding {
    handle: Handle,
    thread: JoinHandle<()>,
    ending: Arc<AtomicI32>,
}

impl Forwarding {
    pub fn start(wanted: &[i32], guard: &Child) -> std::io::Result<Self> {
        let mut incoming = Signals::new(signals::not_ignored(wanted))?;
        let (handle, guard) = (incoming.handle(), Pid::from_child(guard));
        let ending = Arc::new(AtomicI32::new(0));
        let last = Arc::clone(&ending);
        let thread = thread::Builder::new().name("signals".to_owned()).spawn(move || {
            for number in incoming.forever() {
                if signals::ends_the_run(number) {
                    last.store(number, Ordering::Relaxed);
                }
                let _ = signals::from_number(number).map(|signal| kill_process(guard, signal));
            }
        })?;
        Ok(Self { handle, thread, ending })
    }

    /// Returns the last signal that asked to end the run.
    pub fn stop(self) -> Option<i32> {
        self.handle.close();
        let _ = self.thread.join();
        Some(self.ending.load(Ordering::Relaxed)).filter(|number| *number != 0)
    }
}
