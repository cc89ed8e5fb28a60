//! The guard of pinned memory: its pages are protected from the time when a copy of them is issued until the host has
//! waited for it, so that a host that touches them too early is caught. When the copy happens to run does not matter.
//!
//! For a copy to the device the host may not write them, and for one from the device it may neither read nor write
//! them. The handler of the fault takes no lock: the thread that faults may hold any. It reads a table of atomics
//! (`fault.rs`); how often each page is in use is behind a lock of its own, which the handler never asks for.

mod fault;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

pub use fault::{forget, take_touches};

const PAGE: usize = 4096;

/// How many guarded copies read each page, and how many write it.
static PAGES: Mutex<BTreeMap<usize, [u32; 2]>> = Mutex::new(BTreeMap::new());

fn pages() -> MutexGuard<'static, BTreeMap<usize, [u32; 2]>> {
    PAGES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A guarded copy.
#[derive(Clone, Debug)]
pub struct Ticket {
    slot: usize,
    /// The addresses of its pages.
    pages: Range<usize>,
    writes: bool,
}

/// Catches faults from now on; false if the system refuses.
pub fn start() -> bool {
    fault::install()
}

/// Protects the pages of a copy's bytes that are wholly within its block. `writes`: it is one from the device. Nothing
/// is protected if too many copies are queued, or if no page is whole.
pub fn protect(bytes: &Range<usize>, block: &Range<usize>, writes: bool) -> Option<Ticket> {
    let begin = (bytes.start / PAGE * PAGE).max(block.start.next_multiple_of(PAGE));
    let end = bytes.end.next_multiple_of(PAGE).min(block.end / PAGE * PAGE);
    if begin >= end {
        return None;
    }
    let slot = fault::enter(bytes, writes)?;
    let mut all = pages();
    for page in (begin..end).step_by(PAGE) {
        all.entry(page).or_default()[usize::from(writes)] += 1;
    }
    apply(&all, begin..end);
    Some(Ticket { slot, pages: begin..end, writes })
}

/// Runs work of the stand-in, which may touch what is guarded: the pages of these copies, and what a fault shows.
pub fn run(tickets: &[Ticket], work: impl FnOnce()) {
    fault::let_pass(true);
    for ticket in tickets {
        set(&ticket.pages, libc::PROT_READ | libc::PROT_WRITE);
    }
    work();
    let all = pages();
    tickets.iter().for_each(|ticket| apply(&all, ticket.pages.clone()));
    fault::let_pass(false);
}

/// The host has waited for the copy: its pages are free, unless other copies have them.
pub fn release(ticket: &Ticket) {
    fault::leave(ticket.slot);
    let mut all = pages();
    for page in ticket.pages.clone().step_by(PAGE) {
        if let Some(uses) = all.get_mut(&page) {
            uses[usize::from(ticket.writes)] -= 1;
            if *uses == [0, 0] {
                all.remove(&page);
            }
        }
    }
    apply(&all, ticket.pages.clone());
}

/// Gives each page the protection that its uses ask for.
fn apply(all: &BTreeMap<usize, [u32; 2]>, range: Range<usize>) {
    let protection = |page: usize| match all.get(&page) {
        Some([_, writers]) if *writers > 0 => libc::PROT_NONE,
        Some(_) => libc::PROT_READ,
        None => libc::PROT_READ | libc::PROT_WRITE,
    };
    let mut begin = range.start;
    for page in range.clone().step_by(PAGE) {
        if protection(page) != protection(begin) {
            set(&(begin..page), protection(begin));
            begin = page;
        }
    }
    set(&(begin..range.end), protection(begin));
}

fn set(pages: &Range<usize>, protection: i32) {
    // SAFETY: whole pages of a pinned block, which stays until its copies have run. If the system refuses, the pages
    // keep the protection that they have: an early touch is missed, or seen by the handler, which opens them.
    unsafe { libc::mprotect(pages.start as *mut libc::c_void, pages.len(), protection) };
}

#[cfg(test)]
mod tests;
