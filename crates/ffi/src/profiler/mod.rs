//! Sessions of libtorch's profiler (kineto), and what they record.
//!
//! Users call `overdrive_profile::Profiler`, which also has PyTorch's schedule, tables and traces. Scopes cost next to
//! nothing while no session records, so [`record_function`] may stay in the code.

mod events;
mod scope;

use std::ffi::{CStr, CString};
use std::hash::{BuildHasher as _, RandomState};
use std::marker::PhantomData;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

pub use events::{Event, Input};
pub use scope::{Scope, ScopeGuard, Thread, record_function};

use crate::error::{Error, check};
use crate::raw_profiler as raw;

/// What a session records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Operators and scopes of the thread that starts the session, and of the backward pass.
    pub cpu: bool,
    /// Kernels, copies and calls of the CUDA runtime.
    pub cuda: bool,
    /// The shapes and types of the operators' inputs.
    pub record_shapes: bool,
    /// Memory allocated and freed.
    pub profile_memory: bool,
    /// Floating point operations, computed from the shapes, which are recorded as well.
    pub with_flops: bool,
    /// The names of the operators' overloads.
    pub overload_names: bool,
}

impl Options {
    /// The id must outlive the returned options.
    fn raw(self, trace_id: &CStr) -> raw::Options {
        raw::Options {
            cpu: i32::from(self.cpu),
            cuda: i32::from(self.cuda),
            record_shapes: i32::from(self.record_shapes),
            profile_memory: i32::from(self.profile_memory),
            with_flops: i32::from(self.with_flops),
            overload_names: i32::from(self.overload_names),
            trace_id: trace_id.as_ptr(),
        }
    }
}

/// Whether this process has a session: kineto supports one at a time.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// A session of the profiler, from its preparation to its end.
///
/// Dropping it, also in a panic, ends it and discards what it recorded. It is not `Send`, because it records the
/// operators of the thread that starts it.
#[derive(Debug)]
pub struct Session {
    options: Options,
    trace_id: CString,
    state: State,
    _not_send: PhantomData<*const ()>,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Prepared,
    Recording(Window),
    Over,
}

/// The start of a session's recording, by the monotonic and the system clock.
#[derive(Clone, Copy, Debug)]
struct Window {
    number: u64,
    began: Instant,
    began_ns: i64,
}

/// What a session recorded.
#[derive(Debug)]
pub struct Recorded {
    /// libtorch's part.
    pub trace: Trace,
    /// Scopes of threads other than the session's own.
    pub scopes: Vec<Scope>,
    /// How many of these scopes were left out because there were too many.
    pub scopes_lost: u64,
    /// How long the session recorded.
    pub length_ns: i64,
    /// How far the system clock jumped during the session, in nanoseconds; times are wrong by up to that much.
    pub clock_jump_ns: i64,
}

impl Session {
    /// Prepares the profiler, so that starting costs little; `None` while another session of this process is open.
    ///
    /// # Errors
    /// When libtorch refuses, for instance because there is nothing to record.
    pub fn prepare(options: Options) -> Result<Option<Self>, Error> {
        if !(options.cpu || options.cuda) {
            return Err(Error::refused("the profiler has nothing to record: neither the CPU nor CUDA is chosen"));
        }
        if TAKEN.swap(true, Ordering::AcqRel) {
            return Ok(None);
        }
        let mut session = Self { options, trace_id: new_trace_id(), state: State::Prepared, _not_send: PhantomData };
        let raw = options.raw(&session.trace_id);
        // SAFETY: the options and their id live through the call.
        let prepared = check(|err| unsafe { raw::od_profiler_prepare(&raw, err) });
        if let Err(error) = prepared {
            session.state = State::Over;
            return Err(error);
        }
        Ok(Some(session))
    }

    /// Starts recording.
    ///
    /// # Errors
    /// When libtorch refuses, or the session is already recording.
    pub fn start(&mut self) -> Result<(), Error> {
        if self.is_recording() {
            return Err(Error::refused("this profiler is already recording"));
        }
        self.enable()?;
        let (began, began_ns) = both_clocks();
        let window = Window { number: scope::next_session(), began, began_ns };
        scope::begin(window);
        self.state = State::Recording(window);
        Ok(())
    }

    fn enable(&self) -> Result<(), Error> {
        let raw = self.options.raw(&self.trace_id);
        // SAFETY: the options and their id live through the call.
        check(|err| unsafe { raw::od_profiler_enable(&raw, err) })
    }

    /// Whether the session has started.
    pub fn is_recording(&self) -> bool {
        matches!(self.state, State::Recording(_))
    }

    /// Adds a key to the head of the trace; `json` is the JSON value to write there.
    ///
    /// # Errors
    /// When a text has a NUL byte, or libtorch refuses.
    pub fn add_metadata(&self, key: &str, json: &str) -> Result<(), Error> {
        let text = |text: &str| CString::new(text).map_err(|_| Error::refused(format!("{text:?} has a NUL byte")));
        let (key, json) = (text(key)?, text(json)?);
        // SAFETY: both strings live through the call.
        check(|err| unsafe { raw::od_profiler_add_metadata(key.as_ptr(), json.as_ptr(), err) })
    }

    /// Ends the session and returns what it recorded. Scopes of this thread that are still open end here.
    ///
    /// # Errors
    /// When the session has not started, or libtorch fails.
    ///
    /// # Syncs
    /// No. Kernels that have not ended are not in the trace, so wait for the device before.
    pub fn stop(mut self) -> Result<Recorded, Error> {
        let State::Recording(window) = self.state else {
            return Err(Error::refused("this profiler has not started"));
        };
        self.state = State::Over;
        let (scopes, scopes_lost) = scope::end(window.number);
        let (ended, ended_ns) = both_clocks();
        let length_ns = nanoseconds(ended.duration_since(window.began).as_nanos());
        let clock_jump_ns = ended_ns - window.began_ns - length_ns;
        Ok(Recorded { trace: Trace::end_of_session()?, scopes, scopes_lost, length_ns, clock_jump_ns })
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        match self.state {
            State::Recording(window) => {
                drop(scope::end(window.number));
                drop(Trace::end_of_session());
            }
            // A prepared session can only be ended by starting it.
            State::Prepared => drop(self.enable().and_then(|()| Trace::end_of_session())),
            State::Over => {}
        }
        TAKEN.store(false, Ordering::Release);
    }
}

/// What libtorch recorded; freed when dropped.
#[derive(Debug)]
pub struct Trace {
    raw: *mut raw::Trace,
    /// Held while the trace is written.
    saving: Mutex<()>,
}

// SAFETY: the C++ side is plain memory that belongs to no thread, as `profiler.h` says.
unsafe impl Send for Trace {}
// SAFETY: events and start time are only read. Saving changes only data that nothing else reads, one thread at a time.
unsafe impl Sync for Trace {}

impl Trace {
    fn end_of_session() -> Result<Self, Error> {
        let mut out = ptr::null_mut();
        // SAFETY: `out` lives through the call.
        check(|err| unsafe { raw::od_profiler_disable(&mut out, err) })?;
        Ok(Self { raw: out, saving: Mutex::new(()) })
    }

    /// When the session began, in nanoseconds since the Unix epoch.
    ///
    /// # Errors
    /// None are known.
    pub fn start_ns(&self) -> Result<i64, Error> {
        let mut out = 0;
        // SAFETY: the trace is alive, and `out` lives through the call.
        check(|err| unsafe { raw::od_trace_start_ns(self.raw, &mut out, err) })?;
        Ok(out)
    }

    /// Every event, in libtorch's order.
    ///
    /// # Errors
    /// When the host runs out of memory.
    pub fn events(&self) -> Result<Vec<Event>, Error> {
        events::copy(self.raw)
    }

    /// Writes the trace in Chrome's format, as kineto does. Works once.
    ///
    /// kineto does not report failures to write: check the file.
    ///
    /// # Errors
    /// When the trace has been written before, or the path has a NUL byte.
    pub fn save(&self, path: &Path) -> Result<(), Error> {
        let path = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| Error::refused(format!("the path {path:?} has a NUL byte")))?;
        let _one_at_a_time = self.saving.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the trace is alive, and no other thread writes it; the path lives through the call.
        check(|err| unsafe { raw::od_trace_save(self.raw, path.as_ptr(), err) })
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        // SAFETY: made by `od_profiler_disable` and not used after this.
        unsafe { raw::od_trace_free(self.raw) }
    }
}

/// A unique trace id of 128 bits, in PyTorch's format.
fn new_trace_id() -> CString {
    // `RandomState` is the standard library's source of random numbers.
    let random = || RandomState::new().hash_one(TAKEN.as_ptr() as usize);
    CString::new(format!("{:016X}{:016X}", random(), random())).unwrap_or_default()
}

/// The monotonic and the system clock at the same moment. They are read again if the thread has lost its CPU in
/// between, because that would look as if the system clock had been set.
fn both_clocks() -> (Instant, i64) {
    const CLOSE: Duration = Duration::from_millis(1);
    const MOST_TRIES: usize = 100;
    let mut tries = 0;
    loop {
        let (now, now_ns) = (Instant::now(), unix_ns());
        tries += 1;
        if now.elapsed() < CLOSE || tries == MOST_TRIES {
            return (now, now_ns);
        }
    }
}

/// The system clock, in nanoseconds since the Unix epoch.
fn unix_ns() -> i64 {
    match SystemTime::now().duration_since(UNIX_EPOCH) {
        Ok(since) => nanoseconds(since.as_nanos()),
        Err(before) => -nanoseconds(before.duration().as_nanos()),
    }
}

/// Saturates in the year 2262.
fn nanoseconds(count: u128) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
