//! What CUPTI records: calls, kernels, copies, fills and waits, with times that are not real.
//!
//! The entries before the C functions tell of calls, [`crate::issue`] of work. While nobody traces, both
//! look at one number.

pub mod functions;
pub mod records;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::{CStr, CString};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::clock::Access;
use crate::entry::{TRACE, is_watched, watch};
use crate::world::{CURRENT, World, world};
use functions::{COPY, LAUNCH};
use records::{
    CONCURRENT_KERNEL, Call, Copy6, EXTERNAL_CORRELATION, External, Fill, Kernel, MEMCPY, MEMCPY2, MEMSET, PeerCopy,
    RUNTIME, Record, SYNCHRONIZATION, Wait,
};

/// How long work and calls take, in the units of the clock.
const DURATION: u64 = 1000;

/// Asks the profiler for a buffer: its address, its size, and how many records it takes (0: as many as fit).
pub type Ask = extern "C" fn(*mut *mut u8, *mut usize, *mut usize);
/// Gives it back, with the number of bytes that are records.
pub type Give = extern "C" fn(usize, u32, *mut u8, usize, usize);

/// A buffer of the profiler.
#[derive(Clone, Copy)]
pub struct Buffer {
    pub address: usize,
    pub size: usize,
    pub max_records: usize,
}

/// What is recorded, and the records.
#[derive(Default)]
pub struct Trace {
    pub kinds: BTreeSet<u32>,
    pub unwanted_functions: BTreeSet<u32>,
    pub ask: Option<Ask>,
    pub give: Option<Give>,
    pub clock: Option<extern "C" fn() -> u64>,
    pub buffer: Option<Buffer>,
    pub records: VecDeque<Vec<u8>>,
    pub dropped: usize,
    pub has_subscriber: bool,
    own_clock: u64,
    calls: u32,
    /// When the last work of each stream ends.
    ends: BTreeMap<u64, u64>,
    /// Records point at them, so they stay.
    names: BTreeMap<String, &'static CStr>,
}

/// Grid, block and shared memory of a launch.
pub type Shape = ([u32; 3], [u32; 3], usize);

thread_local! {
    /// The thread's call: its number, and that of its function.
    static CALL: Cell<Option<(u32, u32)>> = const { Cell::new(None) };
    /// The profiler's numbers of what the thread does, innermost last, each with its kind.
    pub static EXTERNAL: RefCell<Vec<(u32, u64)>> = const { RefCell::new(Vec::new()) };
    static SHAPE: Cell<Option<Shape>> = const { Cell::new(None) };
}

static ALL: LazyLock<Mutex<Trace>> = LazyLock::new(Mutex::default);

pub fn all() -> MutexGuard<'static, Trace> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Changes what is recorded.
pub fn change<T>(change: impl FnOnce(&mut Trace) -> T) -> T {
    let mut all = all();
    let result = change(&mut all);
    watch(TRACE, !all.kinds.is_empty());
    result
}

/// Whether anything is recorded.
#[cfg(test)]
pub fn is_traced() -> bool {
    is_watched(TRACE)
}

/// Launches a kernel of this shape. One that is captured leaves no shape to the next one.
pub fn shaped<T>(shape: Shape, launch: impl FnOnce() -> T) -> T {
    SHAPE.set(is_watched(TRACE).then_some(shape));
    let result = launch();
    SHAPE.set(None);
    result
}

/// A buffer from the profiler. Its function is called without the lock, because it may call back.
pub fn ask_for_buffer() -> Option<Buffer> {
    let ask = all().ask?;
    let (mut address, mut size, mut max_records) = (std::ptr::null_mut(), 0, 0);
    ask(&mut address, &mut size, &mut max_records);
    (!address.is_null()).then_some(Buffer { address: address as usize, size, max_records })
}

/// A C function is called. A profiler flushes only if it was asked for a buffer, as the real library does with its
/// first record.
pub fn call(name: &str, argument: usize, status: i32) {
    let Some(function) = functions::number(name) else { return CALL.set(None) };
    if all().buffer.is_none() {
        let buffer = ask_for_buffer();
        all().buffer = buffer;
    }
    let wait = wait_of(name, argument);
    all().call(function, status, wait);
}

/// CUPTI's kind of wait (`CUpti_ActivitySynchronizationType`), the stream and the event; all bits: none.
fn wait_of(name: &str, argument: usize) -> Option<(u32, u32, u32)> {
    let stream = |handle| world().stream(handle).unwrap_or(u64::MAX) as u32;
    match name {
        "cudaEventSynchronize" => Some((1, u32::MAX, argument as u32)),
        "cudaStreamSynchronize" => Some((3, stream(argument), u32::MAX)),
        "cudaDeviceSynchronize" => Some((4, u32::MAX, u32::MAX)),
        _ => None,
    }
}

/// Work is put into a stream of a device.
pub fn work(world: &World, (device, stream): (usize, u64), what: &str, accesses: &[Access]) {
    if is_watched(TRACE) {
        all().work(world, (device, stream), what, accesses);
    }
}

impl Trace {
    fn now(&mut self) -> u64 {
        self.own_clock += DURATION;
        self.clock.map_or(self.own_clock, |clock| clock())
    }

    fn add(&mut self, kind: u32, record: &impl Record) {
        if self.kinds.contains(&kind) {
            self.records.push_back(record.bytes());
        }
    }

    fn call(&mut self, function: u32, status: i32, wait: Option<(u32, u32, u32)>) -> (u32, u32) {
        let start = self.now();
        self.calls += 1;
        let correlation = self.calls;
        CALL.set(Some((correlation, function)));
        if self.unwanted_functions.contains(&function) {
            return (correlation, function);
        }
        // cupti_activity.h: before the call's record, one for each kind of number that the thread has.
        let kinds = EXTERNAL.with_borrow(|all| all.iter().copied().collect::<BTreeMap<_, _>>());
        for (external_kind, external) in kinds {
            let record = External { kind: EXTERNAL_CORRELATION, external_kind, external, correlation, reserved: 0 };
            self.add(EXTERNAL_CORRELATION, &record);
        }
        let (end, status) = (start + DURATION, status as u32);
        // SAFETY: this only reads the thread's number.
        let thread = unsafe { libc::pthread_self() } as u32;
        let process = std::process::id();
        self.add(RUNTIME, &Call { kind: RUNTIME, function, start, end, process, thread, correlation, status });
        if let Some((wait_kind, stream, event)) = wait {
            let (kind, context) = (SYNCHRONIZATION, CURRENT.get() as u32 + 1);
            let (event_wait, pad) = (u64::from(correlation), 0);
            let wait =
                Wait { kind, wait_kind, start, end, correlation, context, stream, event, event_wait, status, pad };
            self.add(SYNCHRONIZATION, &wait);
        }
        (correlation, function)
    }

    fn work(&mut self, world: &World, (device, stream): (usize, u64), what: &str, accesses: &[Access]) {
        // A library's kernel is launched by the library.
        let (correlation, function) = CALL.get().unwrap_or_else(|| self.call(LAUNCH, 0, None));
        let start = self.now().max(self.ends.get(&stream).copied().unwrap_or(0));
        let end = start + DURATION;
        self.ends.insert(stream, end);
        let (device, context, stream) = (device as u32, device as u32 + 1, stream as u32);
        let bytes = accesses.last().map_or(0, |access| access.bytes.len() as u64);
        let place = |access: Option<&Access>| {
            let address = access.map_or(0, |access| access.bytes.start);
            (world.device_at(address), memory_kind(world, address))
        };
        let flags = u8::from(function != COPY);
        if what == "fill" {
            let memory_kind = u16::from(place(accesses.first()).1);
            let base =
                Fill { kind: MEMSET, bytes, start, end, device, context, stream, correlation, ..Fill::default() };
            self.add(MEMSET, &Fill { flags: flags.into(), memory_kind, ..base });
        } else if what.starts_with("copy ") {
            let [(from, from_kind), (to, to_kind)] = [place(accesses.first()), place(accesses.last())];
            match (from, to) {
                (Some(from), Some(to)) if from != to => {
                    let [from, to] = [from, to].map(|device| [device as u32, device as u32 + 1]);
                    let base =
                        PeerCopy { kind: MEMCPY2, copy_kind: 10, from_kind, to_kind, flags, ..PeerCopy::default() };
                    let base = PeerCopy { bytes, start, end, device, context, stream, correlation, ..base };
                    self.add(MEMCPY2, &PeerCopy { from, to, ..base });
                }
                _ => {
                    // CUpti_ActivityMemcpyKind.
                    let copy_kind = match (from, to) {
                        (None, Some(_)) => 1,
                        (Some(_), None) => 2,
                        (Some(_), Some(_)) => 8,
                        (None, None) => 9,
                    };
                    let base = Copy6 { kind: MEMCPY, copy_kind, from_kind, to_kind, flags, ..Copy6::default() };
                    let base = Copy6 { bytes, start, end, device, context, stream, correlation, ..base };
                    self.add(MEMCPY, &Copy6 { copies: 1, ..base });
                }
            }
        } else {
            let (grid, block, shared) = SHAPE.take().unwrap_or(([1; 3], [1; 3], 0));
            let name = self.name(what).as_ptr() as usize;
            let (kind, registers, dynamic_shared) = (CONCURRENT_KERNEL, 32, shared as i32);
            let base = Kernel { kind, registers, grid, block, dynamic_shared, name, ..Kernel::default() };
            let base = Kernel { start, end, completed: end, device, context, stream, correlation, ..base };
            self.add(CONCURRENT_KERNEL, &Kernel { grid_id: i64::from(correlation), ..base });
        }
    }

    fn name(&mut self, name: &str) -> &'static CStr {
        if let Some(own) = self.names.get(name) {
            return own;
        }
        let own: &CStr = Box::leak(CString::new(name.replace('\0', " ")).unwrap_or_default().into_boxed_c_str());
        self.names.insert(name.to_owned(), own);
        own
    }
}

/// `CUpti_ActivityMemoryKind` of an address.
fn memory_kind(world: &World, address: usize) -> u8 {
    match (world.device_at(address), world.is_pinned(address)) {
        (Some(_), _) => 3,
        (None, true) => 2,
        (None, false) => 1,
    }
}
