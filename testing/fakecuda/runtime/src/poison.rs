//! Bytes that nobody has computed, by the name of what should have.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// Ranges of host addresses: where they begin, where they end, and why.
#[derive(Debug, Default)]
pub struct Poison {
    ranges: BTreeMap<usize, (usize, String)>,
    /// What has read them since somebody asked, in words.
    pub reads: Vec<String>,
}

static POISON: LazyLock<Mutex<Poison>> = LazyLock::new(Mutex::default);

/// The process's poison. Its lock is taken while work runs, after the world's.
pub fn poison() -> MutexGuard<'static, Poison> {
    POISON.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes bytes poison, and each float32 in them NaN: no program may rely on what is there.
///
/// The caller promises memory that nobody else uses meanwhile.
pub fn spoil(begin: usize, bytes: usize, why: &str) {
    poison().mark(begin, bytes, why);
    // SAFETY: as the caller promises.
    unsafe { std::ptr::write_bytes(begin as *mut u8, 0xff, bytes) };
}

impl Poison {
    /// Nobody has computed these bytes.
    pub fn mark(&mut self, begin: usize, bytes: usize, why: &str) {
        self.clear(begin, bytes);
        if bytes > 0 {
            self.ranges.insert(begin, (begin + bytes, why.to_owned()));
        }
    }

    /// These bytes have been written.
    pub fn clear(&mut self, begin: usize, bytes: usize) {
        let end = begin + bytes;
        let touched = self.ranges.range(..end).rev().take_while(|(_, (own_end, _))| *own_end > begin);
        let touched: Vec<usize> = touched.map(|(at, _)| *at).collect();
        for at in touched {
            let Some((own_end, why)) = self.ranges.remove(&at) else { continue };
            if own_end > end {
                self.ranges.insert(end, (own_end, why.clone()));
            }
            if at < begin {
                self.ranges.insert(at, (begin, why));
            }
        }
    }

    /// Why one of these bytes is poison.
    pub fn of(&self, begin: usize, bytes: usize) -> Option<&str> {
        let (_, (end, why)) = self.ranges.range(..begin + bytes).next_back()?;
        (*end > begin && bytes > 0).then_some(why)
    }

    /// The poison within a range: where it is, and why.
    pub fn within(&self, range: Range<usize>) -> Vec<(Range<usize>, String)> {
        let before = self.ranges.range(..range.end).rev().take_while(|(_, (end, _))| *end > range.start);
        before.map(|(at, (end, why))| (range.start.max(*at)..range.end.min(*end), why.clone())).collect()
    }

    /// Notes once that poison is read.
    pub fn read(&mut self, who: &str, begin: usize, bytes: usize) {
        let Some(why) = self.of(begin, bytes) else { return };
        let read = format!("{who} reads {bytes} bytes that were not computed: {why}");
        if !self.reads.contains(&read) {
            self.reads.push(read);
        }
    }

    /// A copy: the target is poison as far as the source is, and the host's reading of poison is noted.
    pub fn copy(&mut self, to: usize, from: usize, bytes: usize, to_host: bool) {
        if to_host {
            return self.read("the host", from, bytes);
        }
        match self.of(from, bytes).map(str::to_owned) {
            Some(why) => self.mark(to, bytes, &why),
            None => self.clear(to, bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_poison_until_they_are_written() {
        let mut poison = Poison::default();
        poison.mark(100, 50, "kernel");
        assert_eq!(
            (poison.of(90, 10), poison.of(90, 11), poison.of(149, 1), poison.of(150, 9)),
            (None, Some("kernel"), Some("kernel"), None)
        );
        poison.clear(110, 10);
        assert_eq!(
            (poison.of(100, 10), poison.of(110, 10), poison.of(120, 30)),
            (Some("kernel"), None, Some("kernel"))
        );
        poison.mark(105, 30, "another");
        assert_eq!(
            (poison.of(100, 5), poison.of(105, 1), poison.of(134, 2)),
            (Some("kernel"), Some("another"), Some("kernel"))
        );
        let parts = poison.within(104..125);
        assert_eq!(parts, [(105..125, "another".to_owned()), (104..105, "kernel".to_owned())]);
        poison.clear(0, 1000);
        assert_eq!(poison.of(0, 1000), None);
    }

    #[test]
    fn a_copy_takes_poison_along_and_the_hosts_reading_is_noted_once() {
        let mut poison = Poison::default();
        poison.mark(0, 8, "kernel");
        poison.copy(100, 0, 8, false);
        assert_eq!(poison.of(100, 8), Some("kernel"));
        poison.copy(200, 100, 8, true);
        poison.copy(200, 100, 8, true);
        assert_eq!(poison.reads, ["the host reads 8 bytes that were not computed: kernel"]);
        poison.copy(100, 50, 8, false);
        assert_eq!(poison.of(100, 8), None);
    }
}
