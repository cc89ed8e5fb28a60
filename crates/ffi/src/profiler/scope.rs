//! User-defined scopes: recorded by libtorch on the session's thread, and timed here on all others.
//!
//! libtorch can record every thread, but then a thread that is in the middle of an operator when the session ends
//! writes into freed memory. So the operators of other threads are not recorded, and their scopes are timed here.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::num::NonZeroU64;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::{Window, nanoseconds};
use crate::error::check;
use crate::raw_profiler as raw;

/// The most scopes of other threads that one session keeps.
const MOST_SCOPES: usize = 1 << 20;

/// The number of the session that is recording; 0 for none.
static RECORDING: AtomicU64 = AtomicU64::new(0);
static SESSIONS: AtomicU64 = AtomicU64::new(0);
static OTHERS: Mutex<Option<Others>> = Mutex::new(None);

/// The scopes of other threads since libtorch began to record.
struct Others {
    window: Window,
    scopes: Vec<Scope>,
    lost: u64,
}

/// A scope of a thread that libtorch does not record.
#[derive(Clone, Debug)]
pub struct Scope {
    /// The scope's name.
    pub name: Box<str>,
    /// In nanoseconds since the Unix epoch.
    pub start_ns: i64,
    /// In nanoseconds since the Unix epoch.
    pub end_ns: i64,
    /// The thread that it ran on.
    pub thread: Arc<Thread>,
}

/// A thread that has recorded scopes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Thread {
    /// libtorch's thread number.
    pub number: u64,
    /// The system's thread id.
    pub system_id: i64,
    /// The name that the thread was started with.
    pub name: Option<String>,
}

impl Thread {
    fn current() -> Self {
        let (mut number, mut system_id) = (0, 0);
        // SAFETY: both numbers live through the call.
        unsafe { raw::od_current_thread(&mut number, &mut system_id) };
        Self { number, system_id, name: std::thread::current().name().map(str::to_owned) }
    }
}

thread_local! {
    /// The scopes of this thread, innermost last.
    static OPEN: RefCell<Vec<Open>> = const { RefCell::new(Vec::new()) };
    /// The session that this thread started.
    static OWN_SESSION: Cell<u64> = const { Cell::new(0) };
    static LAST_ID: Cell<u64> = const { Cell::new(0) };
    static THREAD: Arc<Thread> = Arc::new(Thread::current());
}

struct Open {
    id: NonZeroU64,
    session: u64,
    name: Box<str>,
    how: How,
}

enum How {
    /// Open in libtorch, which records this thread.
    Watched(*mut raw::Scope),
    Timed(Instant),
    /// libtorch has failed to open it.
    Lost,
}

/// A scope, which ends when this is dropped. See [`record_function`].
#[must_use = "the scope ends when the guard is dropped"]
#[derive(Debug)]
pub struct ScopeGuard {
    id: Option<NonZeroU64>,
    _not_send: PhantomData<*const ()>,
}

/// Names the work until the guard is dropped, for a profiler that may be recording.
///
/// Costs one atomic load while no profiler records. Scopes nest; if a scope ends before a scope inside of it, the inner
/// one is split there into two pieces. Scopes that begin before the profiler starts are not recorded. A scope that is
/// open when it stops ends there if it is on the profiler's own thread, and is not recorded on others. Names are ASCII:
/// `?` replaces other characters, and quotes become apostrophes.
///
/// # Source
/// `torch.profiler.record_function`
#[doc(alias = "RECORD_USER_SCOPE")]
#[inline]
pub fn record_function(name: &str) -> ScopeGuard {
    let session = RECORDING.load(Ordering::Acquire);
    let id = if session == 0 { None } else { enter(session, name) };
    ScopeGuard { id, _not_send: PhantomData }
}

impl ScopeGuard {
    /// Whether a profiler was recording when the scope began.
    pub fn is_open(&self) -> bool {
        self.id.is_some()
    }
}

impl Drop for ScopeGuard {
    #[inline]
    fn drop(&mut self) {
        if let Some(id) = self.id {
            exit(id);
        }
    }
}

#[cold]
fn enter(session: u64, name: &str) -> Option<NonZeroU64> {
    let id = NonZeroU64::MIN.saturating_add(LAST_ID.get());
    LAST_ID.set(id.get());
    let scope = Open::new(id, session, printable(name));
    // Without the list the thread itself is ending.
    OPEN.try_with(|open| open.borrow_mut().push(scope)).ok()?;
    Some(id)
}

/// kineto escapes nothing, and writes `unknown` for a name with a character that is not ASCII.
fn printable(name: &str) -> Box<str> {
    let each = name.chars().map(|character| match character {
        '"' => '\'',
        '\\' => '/',
        ' '..='~' => character,
        _ => '?',
    });
    each.collect()
}

#[cold]
fn exit(id: NonZeroU64) {
    // A scope that a session's end has closed is no longer in the list.
    let _ = OPEN.try_with(|open| {
        let mut open = open.borrow_mut();
        let Some(place) = open.iter().rposition(|scope| scope.id == id) else { return };
        let mut inner = open.split_off(place + 1);
        let ended = open.pop();
        inner.iter_mut().rev().for_each(Open::close);
        if let Some(mut ended) = ended {
            ended.close();
        }
        open.extend(inner.into_iter().map(|scope| Open::new(scope.id, scope.session, scope.name)));
    });
}

impl Open {
    fn new(id: NonZeroU64, session: u64, name: Box<str>) -> Self {
        let how = if OWN_SESSION.get() == session { Self::watched(&name) } else { How::Timed(Instant::now()) };
        Self { id, session, name, how }
    }

    fn watched(name: &str) -> How {
        let mut scope = ptr::null_mut();
        // SAFETY: the text and `scope` live through the call.
        match check(|err| unsafe { raw::od_scope_enter(name.as_ptr(), name.len(), &mut scope, err) }) {
            Ok(()) => How::Watched(scope),
            Err(_) => How::Lost,
        }
    }

    fn close(&mut self) {
        match std::mem::replace(&mut self.how, How::Lost) {
            // SAFETY: opened on this thread, whose session has not ended yet, and not used again. A failure leaves the
            // scope out of the trace.
            How::Watched(scope) => drop(check(|err| unsafe { raw::od_scope_exit(scope, err) })),
            How::Timed(began) => self.record(began, Instant::now()),
            How::Lost => {}
        }
    }

    fn record(&mut self, began: Instant, ended: Instant) {
        let Ok(thread) = THREAD.try_with(Arc::clone) else { return };
        let mut others = others();
        let Some(others) = others.as_mut().filter(|others| others.window.number == self.session) else { return };
        if others.scopes.len() == MOST_SCOPES {
            others.lost += 1;
            return;
        }
        let ns = |at: Instant| {
            let since = at.saturating_duration_since(others.window.began);
            others.window.began_ns.saturating_add(nanoseconds(since.as_nanos()))
        };
        let (start_ns, end_ns) = (ns(began), ns(ended));
        others.scopes.push(Scope { name: self.name.clone(), start_ns, end_ns, thread });
    }
}

fn others() -> MutexGuard<'static, Option<Others>> {
    // Nothing panics while the lock is held.
    OTHERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A new session number.
pub(super) fn next_session() -> u64 {
    SESSIONS.fetch_add(1, Ordering::Relaxed) + 1
}

/// Starts recording scopes; libtorch records this thread's.
pub(super) fn begin(window: Window) {
    *others() = Some(Others { window, scopes: Vec::new(), lost: 0 });
    OWN_SESSION.set(window.number);
    RECORDING.store(window.number, Ordering::Release);
}

/// Closes this thread's scopes and returns those of other threads.
///
/// Must run before libtorch ends its session: a libtorch scope that outlives its session writes into freed memory.
pub(super) fn end(session: u64) -> (Vec<Scope>, u64) {
    RECORDING.store(0, Ordering::Release);
    let _ = OPEN.try_with(|open| {
        let mut open = open.borrow_mut();
        open.iter_mut().rev().filter(|scope| scope.session == session).for_each(Open::close);
        open.clear();
    });
    OWN_SESSION.set(0);
    others().take().map_or((Vec::new(), 0), |others| (others.scopes, others.lost))
}
