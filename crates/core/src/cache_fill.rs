//! How full the sample caches of this process are, which explains growing memory use.

use std::sync::atomic::{AtomicU64, Ordering};

/// Totals over all live caches. Each cache subtracts its part when it is dropped.
static KEPT: AtomicU64 = AtomicU64::new(0);
static WANTED: AtomicU64 = AtomicU64::new(0);

/// How many samples the caches of this process keep in memory, and how many they will keep once full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheFill {
    /// Samples kept now.
    pub kept: u64,
    /// Samples kept once the caches are full.
    pub wanted: u64,
}

impl CacheFill {
    /// `None` where nothing is cached.
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
    /// An empty cache that will keep `wanted` samples.
    pub fn new(wanted: u64) -> Self {
        WANTED.fetch_add(wanted, Ordering::Relaxed);
        Self { kept: AtomicU64::new(0), wanted: AtomicU64::new(wanted) }
    }

    /// How many samples it keeps.
    pub fn kept(&self) -> u64 {
        self.kept.load(Ordering::Relaxed)
    }

    /// How many samples it will keep, by the present estimate.
    pub fn wanted(&self) -> u64 {
        self.wanted.load(Ordering::Relaxed)
    }

    /// Counts one more sample as kept.
    pub fn keep_one(&self) {
        self.kept.fetch_add(1, Ordering::Relaxed);
        KEPT.fetch_add(1, Ordering::Relaxed);
    }

    /// Sets the estimate of how many samples it will keep.
    pub fn expect(&self, wanted: u64) {
        let before = self.wanted.swap(wanted, Ordering::Relaxed);
        // A decrease wraps around in both operations, so the total is right.
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
