//! Comparing metrics.

/// Whether lower or higher metrics are better.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Lower is better: a loss.
    #[default]
    Min,
    /// Higher is better: an accuracy.
    Max,
}

impl Mode {
    /// The initial best metric: every finite number is better.
    pub(crate) fn worst(self) -> f64 {
        match self {
            Self::Min => f64::INFINITY,
            Self::Max => f64::NEG_INFINITY,
        }
    }

    /// Whether `metric` is better than `best` by more than `delta`. NaN never is.
    pub(crate) fn improves(self, metric: f64, best: f64, delta: f64) -> bool {
        match self {
            Self::Min => metric < best - delta,
            Self::Max => metric > best + delta,
        }
    }
}
