//! How far the caches of this process are filled, for whoever wonders why its memory grows.

use std::sync::atomic::{AtomicU64, Ordering};

/// Of all caches that live. Each gives back what it has added.
static KEPT: AtomicU64 = AtomicU64::new(0);
static WANTED: AtomicU64 = AtomicU64::new(0);

/// How many samples the caches of this process keep in memory, and how many they will.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheFill {
    /// Samples that are there.
    pub kept: u64,
    /// Samples that will be there in the end.
    pub wanted: u64,
}

impl CacheFill {
    /// None where nothing is cached.
    pub fn of_this_process() -> Option<Self> {
        let fill = Self { kept: KEPT.load(Ordering::Relaxed), wanted: WANTED.load(Ordering::Relaxed) };
        (fill.wanted > 0).then_some(fill)
    }
}

/// What one cache adds to the [`CacheFill`] of its process, until it is dropped.
#[derive(Debug)]
pub struct FillingCache {
    kept: AtomicU64,
    wanted: AtomicU64,
}

impl FillingCache {
    /// A cache that is empty, and will keep so many samples.
    pub fn new(wanted: u64) -> Self {
        WANTED.fetch_add(wanted, Ordering::Relaxed);
        Self { kept: AtomicU64::new(0), wanted: AtomicU64::new(wanted) }
    }

    /// How many samples it keeps.
    pub fn kept(&self) -> u64 {
        self.kept.load(Ordering::Relaxed)
    }

    /// How many samples it will keep, as far as can be seen by now.
    pub fn wanted(&self) -> u64 {
        self.wanted.load(Ordering::Relaxed)
    }

    /// One more sample is kept.
    pub fn keep_one(&self) {
        self.kept.fetch_add(1, Ordering::Relaxed);
        KEPT.fetch_add(1, Ordering::Relaxed);
    }

    /// It will keep so many samples, as far as can be seen by now.
    pub fn expect(&self, wanted: u64) {
        let before = self.wanted.swap(wanted, Ordering::Relaxed);
        // Wraps around where it becomes less, and back with it.
        WANTED.fetch_add(wanted.wrapping_sub(before), Ordering::Relaxed);
    }
}

impl Drop for FillingCache {
    fn drop(&mut self) {
        KEPT.fetch_sub(*self.kept.get_mut(), Ordering::Relaxed);
        WANTED.fetch_sub(*self.wanted.get_mut(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caches_add_up_until_they_are_dropped() {
        let (one, other) = (FillingCache::new(10), FillingCache::new(5));
        (0..3).for_each(|_| one.keep_one());
        other.keep_one();
        assert_eq!(CacheFill::of_this_process(), Some(CacheFill { kept: 4, wanted: 15 }));
        one.expect(4);
        assert_eq!(CacheFill::of_this_process(), Some(CacheFill { kept: 4, wanted: 9 }));
        drop(other);
        assert_eq!(CacheFill::of_this_process(), Some(CacheFill { kept: 3, wanted: 4 }));
        drop(one);
        assert_eq!(CacheFill::of_this_process(), None);
    }
}
