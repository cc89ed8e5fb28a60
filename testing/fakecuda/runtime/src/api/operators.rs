//! The numbers of operators, which `testing/fakecuda/operators` computes on the host: its side of `runtime.h`.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::ffi::{CStr, c_char, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::code;
use super::control::kept;
use super::cublas::launch_of_library;
use super::memory::UNWRITTEN;
use crate::clock::Access;
use crate::numbers::{Bytes, compute, not_computed};
use crate::poison::spoil;
use crate::world::{World, world};

thread_local! {
    /// How many kernels the thread has launched, and the number of the stream of the last one.
    static LAUNCHED: Cell<(u64, usize)> = const { Cell::new((0, 0)) };
    /// The operator that it is within, or nothing; `None` until an operator has been called.
    static WITHIN: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Operators that only copy to the host, and leave it to the caller what to do with that.
const COPIES: [&str; 3] = ["aten::copy_", "aten::_to_copy", "aten::_local_scalar_dense"];

/// The operator that the thread is within, if that has to compute what it reads: its kernels have not run.
pub fn reads_within() -> Option<String> {
    WITHIN.with_borrow(|within| within.clone().filter(|name| !name.is_empty() && !COPIES.contains(&name.as_str())))
}

/// The thread launches a kernel. Returns whether operators have numbers, and this one belongs to none.
///
/// The legacy stream has the same handle on all devices: its own number is kept, because the thread may have another
/// device when the operator ends.
pub fn note_launch(world: &World, stream: usize) -> bool {
    let stream = world.stream(stream).map_or(stream, |stream| stream as usize);
    LAUNCHED.set((LAUNCHED.get().0 + 1, stream));
    WITHIN.with_borrow(|within| within.as_deref() == Some(""))
}

/// # Safety
/// `name` has to be null or a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fakecuda_within(name: *const c_char) {
    // SAFETY: as the caller says.
    let name = (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned());
    WITHIN.set(Some(name.unwrap_or_default()));
}

#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_not_computed(at: usize, bytes: usize) {
    not_computed(at, bytes);
}

/// The memory may be what a freed tensor had, which work before this place of the stream still uses. The real device
/// does nothing here: no capture refuses it.
///
/// # Safety
/// `name` has to be a text that ends with a zero byte, and the bytes a block in use.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fakecuda_unwritten(stream: usize, name: *const c_char, at: usize, bytes: usize) -> i32 {
    // SAFETY: as the caller says.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    let mut world = world();
    let (block, why) = (world.on_host(at), format!("{UNWRITTEN}, which {name} has allocated"));
    let accesses = [Access { bytes: at..at + bytes, writes: true }];
    let work = Arc::new(move || spoil(block, bytes, &why));
    code(world.stream(stream).and_then(|stream| match world.legacy_is_unusable(stream) {
        true => Ok(()),
        false => world.push(stream, &name, &accesses, work),
    }))
}

/// It is no wait of the program's: nothing counts it, and no failure is told. A stream that is captured has no work
/// yet.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_finish(stream: usize) -> i32 {
    let mut world = world();
    code(world.stream(stream).and_then(|stream| match world.captures.of(stream) {
        Some(_) => Ok(()),
        None => world.drain(stream),
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_launched() -> u64 {
    LAUNCHED.get().0
}

#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_last_stream() -> usize {
    LAUNCHED.get().1
}

#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_host(address: usize) -> usize {
    world().on_host(address)
}

/// # Safety
/// `kernel` has to be a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fakecuda_launch(kernel: *const c_char, stream: usize) -> i32 {
    // SAFETY: as the caller says.
    launch_of_library(&unsafe { CStr::from_ptr(kernel) }.to_string_lossy(), stream)
}

/// The operators whose numbers the host has computed since the counts began, or will compute.
pub fn computed() -> MutexGuard<'static, BTreeSet<String>> {
    static NAMES: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    NAMES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Their names, a line each.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_computed() -> *const c_char {
    let text: String = computed().iter().map(|name| format!("{name}\n")).collect();
    kept(&text)
}

/// An operator's numbers, until nobody needs them any more.
struct Operator {
    data: *mut c_void,
    /// Returns why it failed, or null; a text that stays until the thread's next call.
    run: extern "C" fn(*mut c_void) -> *const c_char,
    drop: extern "C" fn(*mut c_void),
}

// SAFETY: the caller of `fakecuda_operator` gives the data away, and any thread may run it.
unsafe impl Send for Operator {}
// SAFETY: it runs with the world's lock held, so one thread at a time uses the data.
unsafe impl Sync for Operator {}

impl Operator {
    fn run(&self) -> Option<String> {
        let why = (self.run)(self.data);
        // SAFETY: not null, so a text of `run`'s.
        (!why.is_null()).then(|| unsafe { CStr::from_ptr(why) }.to_string_lossy().into_owned())
    }
}

impl Drop for Operator {
    fn drop(&mut self) {
        (self.drop)(self.data);
    }
}

/// # Safety
/// `name` has to be a text that ends with a zero byte, `ranges` valid for `count` of them; `data` belongs to the
/// stand-in from now on, which gives it to `run` when its turn comes, at each launch of a graph that it was captured
/// into, and to `drop` once, from any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fakecuda_operator(
    stream: usize,
    name: *const c_char,
    ranges: *const Bytes,
    count: usize,
    run: extern "C" fn(*mut c_void) -> *const c_char,
    drop: extern "C" fn(*mut c_void),
    data: *mut c_void,
) -> i32 {
    let operator = Operator { data, run, drop };
    // SAFETY: as the caller says.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    let ranges = match count {
        0 => &[],
        // SAFETY: as the caller says.
        _ => unsafe { std::slice::from_raw_parts(ranges, count) },
    };
    let access = |range: &Bytes| Access { bytes: range.at..range.at + range.bytes, writes: range.writes };
    let accesses: Vec<Access> = ranges.iter().map(access).collect();
    computed().insert(name.clone().into_owned());
    let mut world = world();
    let ranges: Vec<Bytes> = ranges.iter().map(|range| Bytes { at: world.on_host(range.at), ..*range }).collect();
    let own_name = name.clone().into_owned();
    let work = move || compute(&own_name, &ranges, &mut || operator.run());
    code(world.stream(stream).and_then(|stream| world.push(stream, &name, &accesses, Arc::new(work))))
}

#[cfg(test)]
mod tests;
