//! What a test asks of the stand-in itself.

use std::cell::RefCell;
use std::ffi::c_char;

use super::faults::fakecuda_heal;
use super::operators::computed;
use super::streams::has_waited_in_copy;
use crate::guard;
use crate::nvml;
use crate::poison::poison;
use crate::progress::Pace;
use crate::world::{World, world};

/// Keeps a text for the caller, until the thread's next call.
pub(super) fn kept(text: &str) -> *const c_char {
    thread_local! {
        static TEXT: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }
    TEXT.with_borrow_mut(|kept| {
        *kept = text.replace('\0', " ").into_bytes();
        kept.push(0);
        kept.as_ptr().cast()
    })
}

/// Notes what the guard has caught since the last time.
fn note_touches(world: &mut World) {
    let (touches, more) = guard::take_touches();
    if touches.len() + more > 0 {
        world.count("pinned pages touched early", (touches.len() + more) as u64);
    }
    world.notes.extend(touches);
}

/// Waits for all work, and begins to count at 0. What has read poison stays until somebody asks.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_reset() {
    let mut world = world();
    world.synchronize_all();
    note_touches(&mut world);
    world.counts.clear();
    world.notes.clear();
    world.waits.clear();
    computed().clear();
    has_waited_in_copy(None);
}

/// What was counted, as lines of `name: number`.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_counts() -> *const c_char {
    let mut world = world();
    note_touches(&mut world);
    let text: String = world.counts.iter().map(|(name, times)| format!("{name}: {times}\n")).collect();
    kept(&text)
}

/// Races and whatever else was wrong since the last reset, a line each; what has read poison is told once.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_notes() -> *const c_char {
    let mut world = world();
    note_touches(&mut world);
    let reads = std::mem::take(&mut poison().reads);
    let text: String = world.notes.iter().chain(&reads).map(|note| format!("{}\n", note.replace('\n', " "))).collect();
    kept(&text)
}

/// When work runs: 0 at once, 1 when something waits for it, 2 as 1 and at random by this seed. What waits now, runs.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_set_pace(pace: i32, seed: u64) {
    let pace = match pace {
        0 => Pace::Eager,
        1 => Pace::Lazy,
        _ => Pace::Random(seed),
    };
    world().progress.set_pace(pace);
}

/// Puts back what a test may set; counts and notes stay. Work runs at once, nothing fails, nothing is looked for.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_restore() {
    let mut world = world();
    world.synchronize_all();
    world.restore();
    drop(world);
    nvml::all().forget();
    fakecuda_heal();
}

/// Whether races are looked for.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_find_races(on: bool) {
    let mut world = world();
    world.synchronize_all();
    world.finds_races = on;
}

/// What each kernel takes on the device, by its own clock; at 0, where it begins, copies take nothing either.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_launch_cost(microseconds: f64) {
    const NANOSECONDS: f64 = 1000.0;
    // What is below 0 or no number becomes 0.
    world().costs.kernel = (microseconds * NANOSECONDS) as u64;
}

/// How many queries in a row may find work that is not done, before it runs.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_polls(polls: u64) {
    world().progress.set_polls(polls);
}

/// Whether pinned memory is guarded while a copy of it is queued; false if the system does not let faults be caught.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_guard(on: bool) -> bool {
    let mut world = world();
    world.synchronize_all();
    world.guards = on && guard::start();
    world.guards == on
}

/// Whether each wait of the host is told with the functions that led to it.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_trace_waits(on: bool) {
    world().waits.are_traced = on;
}

/// The traced waits: a line for each and how often, with the functions below it, innermost first: those of the program,
/// and then those of its libraries.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_waits() -> *const c_char {
    let text = world().waits.text();
    kept(&text)
}
