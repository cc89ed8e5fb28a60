//! Memory that grows because caches fill, which stops by itself.

use super::facts::Facts;

/// Caches may take this share of the free memory; the rest is left to others.
const MOST_OF_FREE: f64 = 0.9;

/// Caches of the process that kept more samples at the end of the record than at its start.
pub(super) struct Filling {
    kept: u64,
    wanted: u64,
    /// Extrapolated from the memory that the samples have taken so far.
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

    /// Whether there is enough memory for the full caches; true if the free memory is unknown.
    pub fn fits(&self) -> bool {
        self.free_bytes.is_none_or(|free| self.bytes_to_come <= MOST_OF_FREE * free)
    }

    pub fn text(&self) -> String {
        let Self { kept, wanted, bytes_to_come, .. } = self;
        let free = self.free_bytes.map(|bytes| format!(", and {:.1} GB are free", bytes / 1e9)).unwrap_or_default();
        format!(
            "a cache fills: {kept} of {wanted} samples are in memory, the rest needs {:.1} GB{free}",
            bytes_to_come / 1e9
        )
    }
}
