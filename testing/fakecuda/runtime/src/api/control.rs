//! What a test asks of the stand-in itself.

use std::cell::RefCell;
use std::ffi::c_char;

use crate::poison::poison;
use crate::progress::Pace;
use crate::world::world;

/// Keeps a text for the caller, until the thread's next call.
fn kept(text: &str) -> *const c_char {
    thread_local! {
        static TEXT: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }
    TEXT.with_borrow_mut(|kept| {
        *kept = text.replace('\0', " ").into_bytes();
        kept.push(0);
        kept.as_ptr().cast()
    })
}

/// Waits for all work, and begins to count at 0.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_reset() {
    let mut world = world();
    world.synchronize_all();
    world.counts.clear();
    world.notes.clear();
    poison().reads.clear();
}

/// What was counted, as lines of `name: number`.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_counts() -> *const c_char {
    let text: String = world().counts.iter().map(|(name, times)| format!("{name}: {times}\n")).collect();
    kept(&text)
}

/// Races and whatever else was wrong, a line each.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_notes() -> *const c_char {
    let world = world();
    let text: String =
        world.notes.iter().chain(&poison().reads).map(|note| format!("{}\n", note.replace('\n', " "))).collect();
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

/// Whether races are looked for.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_find_races(on: bool) {
    let mut world = world();
    world.synchronize_all();
    world.finds_races = on;
}
