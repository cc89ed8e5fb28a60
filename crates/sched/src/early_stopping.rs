//! Ends training when a metric has stopped improving.

use crate::error::Check;
use crate::{Mode, ScheduleError};

/// [`EarlyStopping`]'s answer to a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The best so far.
    Improved,
    /// No improvement, but fewer than `patience` in a row.
    Waiting,
    /// No improvement for `patience` metrics: stop, and restore the best weights.
    Stop,
}

/// Reports when a metric has stopped improving, and keeps a copy of the best weights.
///
/// `W` is the type of that copy: tensors, a file name, or nothing. A metric of NaN is not an improvement.
///
/// ```
/// use overdrive_sched::{EarlyStopping, Verdict};
///
/// let mut weights = 0;
/// let mut stopping = EarlyStopping::new(2).min_delta(0.01);
/// for loss in [0.5, 0.3, 0.4, 0.295, 0.2] {
///     weights += 1; // an epoch
///     if stopping.step(loss, || weights)? == Verdict::Stop {
///         break;
///     }
/// }
/// assert_eq!(weights, 4); // stopped before the last
/// stopping.restore(|best| weights = *best);
/// assert_eq!(weights, 2);
/// # Ok::<(), overdrive_sched::ScheduleError>(())
/// ```
///
/// # Source
/// Keras and Lightning (`EarlyStopping`); Prechelt, "Early Stopping - But When?" (1998).
#[derive(Clone, Debug, PartialEq)]
pub struct EarlyStopping<W = ()> {
    patience: u64,
    min_delta: f64,
    mode: Mode,
    state: StoppingState,
    kept: Option<W>,
}

/// The state of an [`EarlyStopping`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StoppingState {
    /// The best metric; infinite before the first.
    pub best: f64,
    /// The number of metrics in a row without improvement.
    pub num_bad_epochs: u64,
}

impl<W> EarlyStopping<W> {
    /// Stops at the `patience`-th metric in a row without improvement; 0 acts like 1.
    pub fn new(patience: u64) -> Self {
        let state = StoppingState { best: Mode::Min.worst(), num_bad_epochs: 0 };
        Self { patience, min_delta: 0.0, mode: Mode::Min, state, kept: None }
    }

    /// A metric has to be better by more than this; default 0.
    pub fn min_delta(mut self, min_delta: f64) -> Self {
        self.min_delta = min_delta;
        self
    }

    /// Whether lower or higher is better; default [`Mode::Min`]. Resets the state.
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self.state = StoppingState { best: mode.worst(), num_bad_epochs: 0 };
        self
    }

    /// Takes the next metric. When it is the best so far, `keep` makes the copy to restore in the end.
    ///
    /// # Errors
    /// [`ScheduleError::InvalidOption`] for a `min_delta` that is negative or not finite.
    pub fn step(&mut self, metric: f64, keep: impl FnOnce() -> W) -> Result<Verdict, ScheduleError> {
        self.try_step(metric, || Ok(keep()))
    }

    /// As [`step`](Self::step), with a `keep` that may fail, such as writing a file. If it fails, the metric is not
    /// counted.
    ///
    /// # Errors
    /// Those of `keep` and of [`step`](Self::step).
    pub fn try_step<E>(&mut self, metric: f64, keep: impl FnOnce() -> Result<W, E>) -> Result<Verdict, E>
    where
        E: From<ScheduleError>,
    {
        Check("EarlyStopping").factor("min_delta", self.min_delta)?;
        if self.mode.improves(metric, self.state.best, self.min_delta) {
            self.kept = Some(keep()?);
            self.state = StoppingState { best: metric, num_bad_epochs: 0 };
            return Ok(Verdict::Improved);
        }
        self.state.num_bad_epochs += 1;
        Ok(if self.state.num_bad_epochs >= self.patience { Verdict::Stop } else { Verdict::Waiting })
    }

    /// Passes the best copy to `put_back`; none if no copy was made since this was created or its state was loaded.
    pub fn restore<R>(&self, put_back: impl FnOnce(&W) -> R) -> Option<R> {
        self.kept.as_ref().map(put_back)
    }

    /// The best metric so far; infinite before the first.
    pub fn best(&self) -> f64 {
        self.state.best
    }

    /// The state so far.
    pub fn state(&self) -> StoppingState {
        self.state
    }

    /// Continues from a saved state. The state does not contain the copy of the weights, so the present copy is
    /// dropped.
    ///
    /// # Errors
    /// When the state's best metric is NaN. Nothing changes then.
    pub fn resume(&mut self, state: StoppingState) -> Result<(), ScheduleError> {
        Check("EarlyStopping").that(!state.best.is_nan(), "best", "a number, or infinite", state.best)?;
        (self.state, self.kept) = (state, None);
        Ok(())
    }
}

#[cfg(feature = "torch")]
mod stateful {
    use overdrive_core::{Entry, StateDict, StateError, Stateful};

    use super::{EarlyStopping, StoppingState};
    use crate::attached::count;

    /// The entries are `best` and `num_bad_epochs`. The copy of the weights is not included: save it yourself.
    impl<W> Stateful for EarlyStopping<W> {
        fn state_dict(&self) -> Result<StateDict, StateError> {
            let mut state = StateDict::new();
            state.insert("best", Entry::Float(self.state.best));
            let bad = i64::try_from(self.state.num_bad_epochs).unwrap_or(i64::MAX);
            state.insert("num_bad_epochs", Entry::Int(bad));
            Ok(state)
        }

        fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
            state.refuse_unknown(&["best", "num_bad_epochs"])?;
            let num_bad_epochs = count(state, "num_bad_epochs", i64::MAX as u64)?;
            let best = state.float("best")?;
            self.resume(StoppingState { best, num_bad_epochs }).map_err(|error| StateError::Mismatch {
                key: "best".to_owned(),
                expected: "the best metric so far".to_owned(),
                found: error.to_string(),
            })
        }
    }
}
