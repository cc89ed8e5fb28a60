//! The handler of faults, and the table of guarded copies that it reads.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicUsize, Ordering};

use super::PAGE;

/// The states of a slot of the table: no copy, or what is known of its copy.
const EMPTY: u32 = 0;
const TO_DEVICE: u32 = 1;
const FROM_DEVICE: u32 = 2;
/// It was touched, so that its pages are open.
const WAS_TOUCHED: u32 = 3;
/// The host has waited for it. A fault that happened just before is no error: the instruction is tried again.
const OVER: u32 = 4;

/// A guarded copy, and its bytes.
struct Entry {
    state: AtomicU32,
    begin: AtomicUsize,
    end: AtomicUsize,
}

/// At most so many copies are guarded at a time. A slot is reused as late as possible, because of [`OVER`].
const SLOTS: usize = 4096;

static TABLE: [Entry; SLOTS] =
    [const { Entry { state: AtomicU32::new(EMPTY), begin: AtomicUsize::new(0), end: AtomicUsize::new(0) } }; SLOTS];
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// The thread that runs work of the stand-in, or 0.
static PASSES: AtomicI32 = AtomicI32::new(0);

/// A touch that was caught: how, and which byte of how many. 0 until the handler has written it.
struct Touch {
    how: AtomicU32,
    offset: AtomicUsize,
    length: AtomicUsize,
}

const READS: u32 = 1;
const WRITES: u32 = 2;
#[cfg(not(target_arch = "x86_64"))]
const TOUCHES: u32 = 3;
/// Added to one of these if the copy is from the device.
const IS_FROM_DEVICE: u32 = 4;

const TOUCHES_KEPT: usize = 256;

static TOUCHED: [Touch; TOUCHES_KEPT] =
    [const { Touch { how: AtomicU32::new(0), offset: AtomicUsize::new(0), length: AtomicUsize::new(0) } };
        TOUCHES_KEPT];
/// How many touches were caught, and how many of them [`take_touches`] has reported.
static CAUGHT: AtomicUsize = AtomicUsize::new(0);
static TAKEN: AtomicUsize = AtomicUsize::new(0);

fn this_thread() -> i32 {
    // SAFETY: a system call without arguments.
    unsafe { libc::gettid() }
}

/// Sets whether this thread may touch guarded memory.
pub fn let_pass(does: bool) {
    PASSES.store(if does { this_thread() } else { 0 }, Ordering::SeqCst);
}

/// Enters a copy into the table. One caller at a time: it holds the world's lock.
pub fn enter(bytes: &Range<usize>, from_device: bool) -> Option<usize> {
    let first = NEXT.load(Ordering::Relaxed);
    let is_free = |slot: &usize| matches!(TABLE[*slot].state.load(Ordering::Acquire), EMPTY | OVER);
    let slot = (first..first + SLOTS).map(|slot| slot % SLOTS).find(is_free)?;
    NEXT.store(slot + 1, Ordering::Relaxed);
    let entry = &TABLE[slot];
    entry.state.store(EMPTY, Ordering::SeqCst);
    entry.begin.store(bytes.start, Ordering::SeqCst);
    entry.end.store(bytes.end, Ordering::SeqCst);
    entry.state.store(if from_device { FROM_DEVICE } else { TO_DEVICE }, Ordering::SeqCst);
    Some(slot)
}

/// The host has waited for the copy of a slot.
pub fn leave(slot: usize) {
    TABLE[slot].state.store(OVER, Ordering::SeqCst);
}

/// The memory of these addresses is no longer pinned: a fault there is the program's own.
pub fn forget(block: &Range<usize>) {
    for entry in &TABLE {
        let (begin, end) = (entry.begin.load(Ordering::SeqCst), entry.end.load(Ordering::SeqCst));
        if begin < block.end && block.start < end {
            entry.state.store(EMPTY, Ordering::SeqCst);
        }
    }
}

/// The touches that were caught since the last call, in words, and how many more there were.
pub fn take_touches() -> (Vec<String>, usize) {
    let (from, until) = (TAKEN.load(Ordering::SeqCst), CAUGHT.load(Ordering::SeqCst));
    let mut texts = Vec::new();
    for number in from..until.min(from + TOUCHES_KEPT) {
        let touch = &TOUCHED[number % TOUCHES_KEPT];
        let how = touch.how.swap(0, Ordering::SeqCst);
        let (verb, is_from_device) = (how & 3, how & IS_FROM_DEVICE != 0);
        let verb = match verb {
            0 => continue,
            READS => "reads",
            WRITES => "writes",
            _ => "touches",
        };
        let copy = match is_from_device {
            true => "that a copy from the device has yet to write",
            false => "that a copy to the device still reads",
        };
        let (offset, length) = (touch.offset.load(Ordering::SeqCst), touch.length.load(Ordering::SeqCst));
        texts.push(format!("the host {verb} pinned memory {copy}: byte {offset} of {length}"));
    }
    TAKEN.store(until, Ordering::SeqCst);
    let more = until - from - texts.len();
    (texts, more)
}

/// Notes a touch; called in the handler.
fn note(state: u32, verb: u32, offset: usize, length: usize) {
    let touch = &TOUCHED[CAUGHT.fetch_add(1, Ordering::SeqCst) % TOUCHES_KEPT];
    touch.offset.store(offset, Ordering::SeqCst);
    touch.length.store(length, Ordering::SeqCst);
    touch.how.store(verb + if state == FROM_DEVICE { IS_FROM_DEVICE } else { 0 }, Ordering::SeqCst);
}

/// Opens the page of an address, and all pages of a copy that is touched too early, which is noted once; false if no
/// copy has it. Called in the handler: atomics and system calls, no locks, no memory.
fn open(address: usize, verb: u32) -> bool {
    let page = address / PAGE * PAGE;
    let (mut is_known, mut opened) = (false, page..page + PAGE);
    let passes = PASSES.load(Ordering::SeqCst) == this_thread();
    for entry in &TABLE {
        let state = entry.state.load(Ordering::SeqCst);
        let (begin, end) = (entry.begin.load(Ordering::SeqCst), entry.end.load(Ordering::SeqCst));
        if state == EMPTY || address < begin / PAGE * PAGE || address >= end.next_multiple_of(PAGE) {
            continue;
        }
        is_known = true;
        let is_own = (begin..end).contains(&address) && !passes;
        // Reading what a copy to the device reads is fine; the page may be closed for another one.
        let is_wrong = is_own && (state == FROM_DEVICE || (state == TO_DEVICE && verb != READS));
        if is_wrong && entry.state.compare_exchange(state, WAS_TOUCHED, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            note(state, verb, address - begin, end - begin);
        }
        if is_wrong || (is_own && state == WAS_TOUCHED) {
            let whole = begin.next_multiple_of(PAGE)..end / PAGE * PAGE;
            opened = opened.start.min(whole.start)..opened.end.max(whole.end);
        }
    }
    // SAFETY: pages of a pinned block, or, if it is gone, of nothing: then the system refuses.
    is_known
        && unsafe { libc::mprotect(opened.start as *mut c_void, opened.len(), libc::PROT_READ | libc::PROT_WRITE) == 0 }
}

/// The action that was there before, written once before the handler is installed.
struct Previous(std::cell::UnsafeCell<std::mem::MaybeUninit<libc::sigaction>>);

// SAFETY: written by `install` before the handler that reads it can run, and by nobody later.
unsafe impl Sync for Previous {}

static PREVIOUS: Previous = Previous(std::cell::UnsafeCell::new(std::mem::MaybeUninit::uninit()));
static INSTALLED: AtomicBool = AtomicBool::new(false);
/// Whether a fault that is not the guard's was handed on.
static HANDED_ON: AtomicBool = AtomicBool::new(false);

/// Installs the handler, once for the process.
pub fn install() -> bool {
    if INSTALLED.swap(true, Ordering::SeqCst) {
        return true;
    }
    // SAFETY: the actions are zeroed or written by the system; `on_fault` has the signature that SA_SIGINFO asks for.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_fault as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigemptyset(&raw mut action.sa_mask);
        let previous = PREVIOUS.0.get().cast::<libc::sigaction>();
        libc::sigaction(libc::SIGSEGV, std::ptr::null(), previous) == 0
            && libc::sigaction(libc::SIGSEGV, &raw const action, std::ptr::null_mut()) == 0
    }
}

/// Whether the instruction that faulted writes.
#[cfg(target_arch = "x86_64")]
fn verb_of(context: *mut c_void) -> u32 {
    const WRITE: i64 = 2;
    // SAFETY: the system gives the handler a context; the page fault's error code is in it (bit 1: a write).
    let error = unsafe { (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs[libc::REG_ERR as usize] };
    if error & WRITE == 0 { READS } else { WRITES }
}

/// On other processors, reads and writes are not told apart.
#[cfg(not(target_arch = "x86_64"))]
fn verb_of(_context: *mut c_void) -> u32 {
    TOUCHES
}

extern "C" fn on_fault(signal: i32, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the system gives the handler its information. Whoever was interrupted keeps its errno.
    unsafe {
        let errno = *libc::__errno_location();
        // A positive code is the system's: no program has sent this signal.
        let is_fault = (*info).si_code > 0;
        if !(is_fault && open((*info).si_addr() as usize, verb_of(context))) {
            hand_on(signal, info, context, is_fault);
        }
        *libc::__errno_location() = errno;
    }
}

/// Gives a signal to the handler that was there before.
///
/// # Safety
/// Called in the handler, with what the system gave it.
unsafe fn hand_on(signal: i32, info: *mut libc::siginfo_t, context: *mut c_void, is_fault: bool) {
    // SAFETY: written before this handler was installed.
    let previous = unsafe { &*PREVIOUS.0.get().cast::<libc::sigaction>() };
    let handler = previous.sa_sigaction;
    // A handler that restores what was there before it, and raises the signal again, may end up here: once is enough.
    let is_again = HANDED_ON.swap(true, Ordering::SeqCst) && !is_fault;
    if handler == libc::SIG_DFL || handler == libc::SIG_IGN || is_again {
        // SAFETY: the default action has no handler. A fault happens again after the return, and ends the process.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            if !is_fault {
                libc::raise(signal);
            }
        }
    } else if previous.sa_flags & libc::SA_SIGINFO != 0 {
        // SAFETY: an action with SA_SIGINFO has a handler of this signature.
        let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut c_void) = unsafe { std::mem::transmute(handler) };
        handler(signal, info, context);
    } else {
        // SAFETY: an action without SA_SIGINFO has a handler of this signature.
        let handler: extern "C" fn(i32) = unsafe { std::mem::transmute(handler) };
        handler(signal);
    }
}
