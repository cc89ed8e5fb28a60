//! What a step's memory is used for, and what would make it fit.

/// The memory that a step will need on a device, by what it is used for, and what techniques would save. Made by
/// `overdrive_memory::Estimate`, shown by `overdrive-profile`.
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct MemoryForecast {
    /// The device's name.
    pub device: String,
    /// The samples of a batch.
    pub batch_size: i64,
    /// The most bytes in use at once.
    pub peak_bytes: u64,
    /// What is allowed, if that is known.
    pub limit_bytes: Option<u64>,
    /// The largest batch that fits into it.
    pub largest_batch: Option<i64>,
    /// What memory is used for, largest at the peak first.
    pub uses: Vec<MemoryUse>,
    /// Seconds since the step began, for the bytes of each use.
    pub seconds: Vec<f64>,
    /// The step with other techniques, by its peak.
    pub techniques: Vec<MemoryTechnique>,
}

/// One use of memory over time.
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct MemoryUse {
    /// What the memory is used for: `activations`.
    pub name: String,
    /// Bytes at the peak.
    pub at_peak: u64,
    /// Bytes at each of the forecast's times.
    pub bytes: Vec<u64>,
}

/// What a technique would do to the peak.
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct MemoryTechnique {
    /// The line to change.
    pub name: String,
    /// The peak then.
    pub peak_bytes: u64,
    /// Whether the peak is an estimate, because it leaves out what the technique itself needs.
    pub is_rough: bool,
}
