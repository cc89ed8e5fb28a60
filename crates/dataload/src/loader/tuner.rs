//! Finds how many workers and how much prefetching a training loop needs, from what it waits for.

use std::time::Duration;

/// The number of workers and of batches that they may be ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size {
    pub(crate) workers: usize,
    pub(crate) in_flight: usize,
}

/// Climbs from one worker upwards for as long as the training loop waits and gets faster by it, and then raises the
/// prefetching in the same way.
#[derive(Debug)]
pub(crate) struct Tuner {
    limits: Limits,
    workers: usize,
    /// Batches that each worker may be ahead.
    prefetch: usize,
    batch_bytes: usize,
    phase: Phase,
    round: Round,
    /// Batches a second with the setting before the last change, where it was made to try something.
    before: Option<f64>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) max_workers: usize,
    pub(crate) tune_workers: bool,
    pub(crate) tune_prefetch: bool,
    /// For all batches that are ahead together.
    pub(crate) memory_budget: usize,
    /// Whether the bytes of batches are known.
    pub(crate) counts_bytes: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Workers,
    Prefetch,
    Settled,
}

/// What was measured since the last change.
#[derive(Debug, Default)]
struct Round {
    batches: usize,
    /// Seconds waited for a batch, and from batch to batch.
    waits: Vec<f64>,
    periods: Vec<f64>,
}

/// Batches after a change that still come from the setting before.
const PASSED_OVER: usize = 3;
/// Batches that are measured.
const MEASURED: usize = 6;
/// A training loop that waits for less than this share of its time needs no more.
const ENOUGH: f64 = 0.02;
/// A change that gains less than this is taken back: it would be noise.
const WORTH: f64 = 1.04;
const MAX_PREFETCH: usize = 16;

impl Tuner {
    pub(crate) fn new(limits: Limits, workers: usize, prefetch: usize) -> Self {
        let phase = match (limits.tune_workers, limits.tune_prefetch) {
            (true, _) => Phase::Workers,
            (false, true) => Phase::Prefetch,
            (false, false) => Phase::Settled,
        };
        Self { limits, workers, prefetch, batch_bytes: 0, phase, round: Round::default(), before: None }
    }

    pub(crate) fn size(&self) -> Size {
        let affordable = match self.batch_bytes {
            // Until a batch has been seen, one for each worker has to do.
            0 if self.limits.counts_bytes => self.workers,
            bytes => self.limits.memory_budget / bytes.max(1),
        };
        let in_flight = self.workers.saturating_mul(self.prefetch);
        Size { workers: self.workers, in_flight: in_flight.min(affordable).max(1) }
    }

    /// Takes note of one batch: its bytes, how long the loop waited for it, and the time since the batch before. Gives
    /// a new size when it is time for one.
    pub(crate) fn observe(&mut self, bytes: usize, wait: Duration, period: Duration) -> Option<Size> {
        let before = self.size();
        self.batch_bytes = self.batch_bytes.max(bytes);
        if self.phase != Phase::Settled {
            self.round.batches += 1;
            if self.round.batches > PASSED_OVER {
                self.round.waits.push(wait.as_secs_f64());
                self.round.periods.push(period.as_secs_f64());
            }
            if self.round.batches == PASSED_OVER + MEASURED {
                let round = std::mem::take(&mut self.round);
                let seconds = without_the_worst(round.periods).max(1e-9);
                self.decide((MEASURED - 1) as f64 / seconds, without_the_worst(round.waits) / seconds);
            }
        }
        let size = self.size();
        (size != before).then(|| {
            tracing::debug!(workers = size.workers, in_flight = size.in_flight, "loader tuned");
            size
        })
    }

    fn decide(&mut self, rate: f64, waiting: f64) {
        let gained = self.before.is_none_or(|before| rate > before * WORTH);
        if !gained {
            match self.phase {
                Phase::Workers => self.workers -= 1,
                Phase::Prefetch | Phase::Settled => self.prefetch /= 2,
            }
        }
        let more = gained && waiting > ENOUGH;
        self.before = None;
        if self.phase == Phase::Workers {
            if more && self.workers < self.limits.max_workers {
                self.workers += 1;
                self.before = Some(rate);
                return;
            }
            self.phase = if self.limits.tune_prefetch { Phase::Prefetch } else { Phase::Settled };
            if !gained {
                // The rate belongs to the setting that was just taken back: measure anew.
                return;
            }
        }
        if self.phase == Phase::Prefetch && more && self.prefetch < MAX_PREFETCH {
            self.prefetch *= 2;
            self.before = Some(rate);
        } else {
            self.phase = Phase::Settled;
        }
    }
}

/// The sum of all but the largest: a checkpoint or an evaluation between two batches says nothing about the loader. Not the
/// median, which would not see the bumps that prefetching is for.
fn without_the_worst(times: Vec<f64>) -> f64 {
    let worst = times.iter().copied().fold(0.0, f64::max);
    times.iter().sum::<f64>() - worst
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a training loop of `compute` milliseconds a batch, where one of `useful` workers makes a batch in `work`
    /// milliseconds and `jitter` of the wait is left unless the prefetch reaches 8.
    fn tuned(compute: f64, work: f64, useful: usize, jitter: f64, bytes: usize) -> Tuner {
        let limits =
            Limits { max_workers: 8, tune_workers: true, tune_prefetch: true, memory_budget: 1000, counts_bytes: true };
        let mut tuner = Tuner::new(limits, 1, 2);
        for _ in 0..200 {
            let made = work / tuner.workers.min(useful) as f64;
            let bumps = if tuner.prefetch >= 8 { 0.0 } else { jitter / tuner.prefetch as f64 };
            let wait = (made - compute).max(0.0) + bumps;
            let milliseconds = |time: f64| Duration::from_secs_f64(time / 1e3);
            tuner.observe(bytes, milliseconds(wait), milliseconds(compute + wait));
        }
        assert_eq!(tuner.phase, Phase::Settled);
        tuner
    }

    #[test]
    fn workers_grow_while_they_help() {
        assert_eq!(tuned(10.0, 5.0, 8, 0.0, 1).workers, 1, "one keeps up");
        assert_eq!(tuned(10.0, 25.0, 8, 0.0, 1).workers, 3, "three keep up");
        assert_eq!(tuned(1.0, 100.0, 2, 0.0, 1).workers, 2, "two cores");
        assert_eq!(tuned(0.1, 100.0, 99, 0.0, 1).workers, 8, "the limit");
    }

    #[test]
    fn a_long_pause_between_two_batches_decides_nothing() {
        let limits = Limits {
            max_workers: 8,
            tune_workers: true,
            tune_prefetch: false,
            memory_budget: 1000,
            counts_bytes: true,
        };
        let mut tuner = Tuner::new(limits, 1, 2);
        for batch in 0..200 {
            let period = Duration::from_millis(if batch % 7 == 0 { 500 } else { 100 / tuner.workers.min(4) as u64 });
            tuner.observe(1, period, period);
        }
        assert_eq!((tuner.phase, tuner.workers), (Phase::Settled, 4));
    }

    #[test]
    fn prefetching_grows_against_bumps_within_the_budget() {
        assert_eq!(tuned(10.0, 5.0, 8, 0.0, 1).prefetch, 2);
        assert_eq!(tuned(10.0, 5.0, 8, 8.0, 1).prefetch, 8);
        let poor = tuned(10.0, 5.0, 8, 8.0, 400);
        assert_eq!(poor.size(), Size { workers: 1, in_flight: 2 });
        assert_eq!(tuned(10.0, 5.0, 8, 0.0, 5000).size().in_flight, 1, "never none");
    }
}
