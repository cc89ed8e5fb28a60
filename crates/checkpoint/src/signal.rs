//! Handles SIGTERM and Ctrl-C while a run asks for it.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// The flags that the handlers read. Handlers are registered once per process, because the default cannot be restored.
struct Flags {
    /// True while there is no `Watch`: a signal then ends the process, as it does by default.
    unwatched: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
}

static FLAGS: Mutex<Option<Flags>> = Mutex::new(None);
static WATCHERS: AtomicUsize = AtomicUsize::new(0);

/// Catches signals while it lives.
#[derive(Debug)]
pub(crate) struct Watch {
    unwatched: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
}

impl Watch {
    pub fn new() -> io::Result<Self> {
        let mut flags = FLAGS.lock().unwrap_or_else(PoisonError::into_inner);
        if flags.is_none() {
            let new = Flags { unwatched: Arc::default(), stop: Arc::default() };
            for signal in [SIGINT, SIGTERM] {
                flag::register_conditional_default(signal, new.unwatched.clone())?;
                // A second signal ends the process at once, without waiting for the next step.
                flag::register_conditional_shutdown(signal, 128 + signal, new.stop.clone())?;
                flag::register(signal, new.stop.clone())?;
            }
            *flags = Some(new);
        }
        let Some(flags) = flags.as_ref() else { return Err(io::Error::other("no handlers")) };
        WATCHERS.fetch_add(1, Ordering::SeqCst);
        flags.unwatched.store(false, Ordering::SeqCst);
        Ok(Self { unwatched: flags.unwatched.clone(), stop: flags.stop.clone() })
    }

    pub fn stop_requested(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _flags = FLAGS.lock().unwrap_or_else(PoisonError::into_inner);
        if WATCHERS.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.unwatched.store(true, Ordering::SeqCst);
            self.stop.store(false, Ordering::SeqCst);
        }
    }
}
