//! Memory that grows because caches fill, which ends by itself.

use super::facts::Facts;

/// More than this share of what is free is too much: others grow as well.
const MOST_OF_FREE: f64 = 0.9;

/// The caches of the process, which kept more samples at the end of the record than at its beginning.
pub(super) struct Filling {
    kept: u64,
    wanted: u64,
    /// If samples still to come take as much as those that came.
    bytes_to_come: f64,
    free_bytes: Option<f64>,
}

impl Filling {
    pub fn of(facts: &Facts<'_>) -> Option<Self> {
        let mut seen = facts.samples_of_steps().filter_map(|sample| {
            let resident = sample.process?.own_memory_bytes() as f64;
            Some((sample.caches?, resident))
        });
        let (first, resident_before) = seen.next()?;
        let (last, resident) = seen.last()?;
        let came = last.kept.checked_sub(first.kept).filter(|came| *came > 0)?;
        let to_come = last.wanted.saturating_sub(last.kept);
        Some(Self {
            kept: last.kept,
            wanted: last.wanted,
            bytes_to_come: to_come as f64 * (resident - resident_before).max(0.0) / came as f64,
            free_bytes: facts.samples.last()?.system.and_then(|system| Some(system.memory_available_bytes? as f64)),
        })
    }

    /// Whether there is memory for what is to come, as far as is known.
    pub fn fits(&self) -> bool {
        self.free_bytes.is_none_or(|free| self.bytes_to_come <= MOST_OF_FREE * free)
    }

    pub fn text(&self) -> String {
        let Self { kept, wanted, bytes_to_come, .. } = self;
        let free = self.free_bytes.map(|bytes| format!(", and {:.1} GB are left", bytes / 1e9)).unwrap_or_default();
        format!(
            "a cache fills: {kept} of {wanted} samples are in memory, {:.1} GB are to come{free}",
            bytes_to_come / 1e9
        )
    }
}
