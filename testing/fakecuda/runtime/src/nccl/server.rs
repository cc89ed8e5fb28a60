//! A thread that runs collectives for which nobody in this process waits: those of eager streams whose peers come
//! later, and those of lazy streams for which a peer waits. It sleeps while there are none.

use std::cell::RefCell;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use crate::world::{World, lock};

/// How often it looks whether peers have come.
const PAUSE: Duration = Duration::from_micros(500);

#[derive(Default)]
struct State {
    pending: usize,
    /// The process that has the thread. A forked process does not have it.
    process: u32,
}

static STATE: Mutex<State> = Mutex::new(State { pending: 0, process: 0 });
static CHANGED: Condvar = Condvar::new();

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    static HELD: RefCell<Option<MutexGuard<'static, World>>> = const { RefCell::new(None) };
}

/// Makes a fork wait until the world is not locked. Otherwise the child would have it locked by a thread that it does
/// not have.
fn guard_forks() {
    extern "C" fn before() {
        HELD.set(Some(lock()));
    }
    extern "C" fn after() {
        HELD.set(None);
    }
    // SAFETY: both functions stay loaded. If memory runs out, forks do not wait.
    unsafe { libc::pthread_atfork(Some(before), Some(after), Some(after)) };
}

/// A collective that is not done. The thread runs while there is one.
pub struct Pending(());

impl Pending {
    /// # Errors
    /// When the thread cannot be made.
    pub fn new() -> std::io::Result<Self> {
        let mut state = state();
        if state.process != std::process::id() {
            if state.process == 0 {
                guard_forks();
            }
            thread::Builder::new().name("fakecuda-nccl".to_owned()).spawn(serve)?;
            state.process = std::process::id();
        }
        state.pending += 1;
        CHANGED.notify_all();
        Ok(Self(()))
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        state().pending -= 1;
    }
}

fn serve() {
    loop {
        let idle = |state: &mut State| state.pending == 0;
        drop(CHANGED.wait_while(state(), idle).unwrap_or_else(PoisonError::into_inner));
        thread::sleep(PAUSE);
        lock().progress.serve();
    }
}
