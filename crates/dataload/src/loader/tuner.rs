//! Finds how many workers and how much prefetching a training loop needs, from how long it waits for data.

use std::time::Duration;

/// The number of workers, and of batches that may be loaded ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size {
    pub(crate) workers: usize,
    pub(crate) in_flight: usize,
}

/// Starts with one worker and adds more for as long as the training loop waits for data and each one makes it faster,
/// then raises the prefetching in the same way. If the loop waits later, it tries again, since the first steps are slow
/// and not representative. Each try that gains nothing makes further ones rarer.
#[derive(Debug)]
pub(crate) struct Tuner {
    limits: Limits,
    workers: usize,
    /// Batches loaded ahead, per worker.
    prefetch: usize,
    batch_bytes: usize,
    phase: Phase,
    round: Round,
    /// Batches per second before the last change, while that change is on trial.
    before: Option<f64>,
    /// Rounds with waiting since the tuner settled; when they exceed `retry_after`, it tries again.
    waited: usize,
    retry_after: usize,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) max_workers: usize,
    pub(crate) tune_workers: bool,
    pub(crate) tune_prefetch: bool,
    /// For all batches loaded ahead together.
    pub(crate) memory_budget: usize,
    /// Whether the sizes of batches are known.
    pub(crate) counts_bytes: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Workers,
    Prefetch,
    Settled,
}

/// The measurements since the last change.
#[derive(Debug, Default)]
struct Round {
    batches: usize,
    /// Seconds that the loop waited for each batch, and seconds from batch to batch.
    waits: Vec<f64>,
    periods: Vec<f64>,
}

/// Batches after a change that still show the setting before.
const SKIPPED: usize = 3;
/// Batches measured per round.
const MEASURED: usize = 6;
/// A training loop that waits for less than this share of its time needs no faster loader.
const MAX_WAITING: f64 = 0.02;
/// A change that speeds up the loop by less than this factor is taken back: it may be noise.
const MIN_GAIN: f64 = 1.04;
const MAX_PREFETCH: usize = 16;
/// How many rounds with waiting are tolerated before another try, at first and at most. A try that gains nothing
/// doubles the number, so that useless tries cost next to nothing in a long run.
const FIRST_RETRY_AFTER: usize = 2;
const MAX_RETRY_AFTER: usize = 64;

/// This process's share of `cores` where `local_ranks` ranks run on the host.
pub(crate) fn share_of_cores(cores: usize, local_ranks: Option<usize>) -> usize {
    (cores / local_ranks.unwrap_or(1).max(1)).max(1)
}

/// How many ranks the launcher started on this host; `var` reads an environment variable.
pub(crate) fn local_ranks(var: impl Fn(&str) -> Option<String>) -> Option<usize> {
    // Set by torchrun and overdrive-run, and by Open MPI. Slurm sets the CPU affinity of each task instead.
    let names = ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"];
    names.iter().find_map(|name| var(name)?.trim().parse().ok())
}

impl Tuner {
    pub(crate) fn new(limits: Limits, workers: usize, prefetch: usize) -> Self {
        let phase = match (limits.tune_workers, limits.tune_prefetch) {
            (true, _) => Phase::Workers,
            (false, true) => Phase::Prefetch,
            (false, false) => Phase::Settled,
        };
        let (round, before, retry_after) = (Round::default(), None, FIRST_RETRY_AFTER);
        Self { limits, workers, prefetch, batch_bytes: 0, phase, round, before, waited: 0, retry_after }
    }

    pub(crate) fn size(&self) -> Size {
        let affordable = match self.batch_bytes {
            // Until a batch's size is known: one batch per worker.
            0 if self.limits.counts_bytes => self.workers,
            bytes => self.limits.memory_budget / bytes.max(1),
        };
        let in_flight = self.workers.saturating_mul(self.prefetch);
        Size { workers: self.workers, in_flight: in_flight.min(affordable).max(1) }
    }

    /// Records one batch: its bytes, how long the loop waited for it, and the time since the batch before. Returns the
    /// new size when it changes.
    pub(crate) fn observe(&mut self, bytes: usize, wait: Duration, period: Duration) -> Option<Size> {
        let before = self.size();
        self.batch_bytes = self.batch_bytes.max(bytes);
        if self.limits.tune_workers || self.limits.tune_prefetch {
            self.round.batches += 1;
            if self.round.batches > SKIPPED {
                self.round.waits.push(wait.as_secs_f64());
                self.round.periods.push(period.as_secs_f64());
            }
            if self.round.batches == SKIPPED + MEASURED {
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
        if self.phase == Phase::Settled && !self.looks_again(waiting) {
            return;
        }
        let tried = self.before.take();
        let gained = tried.is_none_or(|before| rate > before * MIN_GAIN);
        match (tried, gained) {
            (Some(_), true) => self.retry_after = FIRST_RETRY_AFTER,
            (Some(_), false) => {
                self.retry_after = (2 * self.retry_after).min(MAX_RETRY_AFTER);
                match self.phase {
                    Phase::Workers => self.workers -= 1,
                    Phase::Prefetch | Phase::Settled => self.prefetch /= 2,
                }
            }
            (None, _) => {}
        }
        let more = gained && waiting > MAX_WAITING;
        if self.phase == Phase::Workers {
            if more && self.workers < self.limits.max_workers {
                self.workers += 1;
                self.before = Some(rate);
                return;
            }
            self.phase = if self.limits.tune_prefetch { Phase::Prefetch } else { Phase::Settled };
            if !gained {
                // The rate belongs to the setting that was just taken back: measure again first.
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

    /// Counts a round since the tuner settled. True if the loop has now waited in enough rounds, so that the tuner
    /// tries again.
    fn looks_again(&mut self, waiting: f64) -> bool {
        self.waited += usize::from(waiting > MAX_WAITING);
        if self.waited <= self.retry_after {
            return false;
        }
        self.waited = 0;
        self.phase = if self.limits.tune_workers { Phase::Workers } else { Phase::Prefetch };
        waiting > MAX_WAITING
    }
}

/// The sum of all times but the largest, which may be a checkpoint or an evaluation between two batches. Not the
/// median, which would hide the occasional slow batches that prefetching is for.
fn without_the_worst(times: Vec<f64>) -> f64 {
    let worst = times.iter().copied().fold(0.0, f64::max);
    times.iter().sum::<f64>() - worst
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits =
        Limits { max_workers: 8, tune_workers: true, tune_prefetch: false, memory_budget: 1000, counts_bytes: true };

    fn milliseconds(time: f64) -> Duration {
        Duration::from_secs_f64(time / 1e3)
    }

    /// A simulated training loop; times in milliseconds.
    #[derive(Clone, Copy)]
    struct Loop {
        /// The time of the training step for a batch.
        compute: f64,
        /// The time of one worker for a batch, and how many workers scale without slowing each other.
        work: f64,
        useful: usize,
        /// The wait that remains unless the prefetch reaches 8.
        jitter: f64,
        bytes: usize,
    }

    impl Loop {
        fn run(self, tuner: &mut Tuner, batches: usize) -> Vec<usize> {
            let step = |_| {
                let made = self.work / tuner.workers.min(self.useful) as f64;
                let bumps = if tuner.prefetch >= 8 { 0.0 } else { self.jitter / tuner.prefetch as f64 };
                let wait = (made - self.compute).max(0.0) + bumps;
                tuner.observe(self.bytes, milliseconds(wait), milliseconds(self.compute + wait));
                tuner.workers
            };
            (0..batches).map(step).collect()
        }
    }

    fn tuned(compute: f64, work: f64, useful: usize, jitter: f64, bytes: usize) -> Tuner {
        let mut tuner = Tuner::new(Limits { tune_prefetch: true, ..LIMITS }, 1, 2);
        Loop { compute, work, useful, jitter, bytes }.run(&mut tuner, 200);
        tuner
    }

    /// The most frequent number of workers during `batches` batches, and how many batches had another number.
    fn mostly(tuner: &mut Tuner, training: Loop, batches: usize) -> (usize, usize) {
        let seen = training.run(tuner, batches);
        let count = |workers: usize| seen.iter().filter(|&&other| other == workers).count();
        let most = (1..=8).max_by_key(|&workers| count(workers)).unwrap();
        (most, batches - count(most))
    }

    #[test]
    fn workers_grow_while_they_help() {
        assert_eq!(tuned(10.0, 5.0, 8, 0.0, 1).workers, 1, "one keeps up");
        assert_eq!(tuned(10.0, 25.0, 8, 0.0, 1).workers, 3, "three keep up");
        assert_eq!(tuned(0.1, 100.0, 99, 0.0, 1).workers, 8, "the limit");
        let two_cores = Loop { compute: 1.0, work: 100.0, useful: 2, jitter: 0.0, bytes: 1 };
        assert_eq!(mostly(&mut Tuner::new(LIMITS, 1, 2), two_cores, 2000).0, 2);
    }

    #[test]
    fn slow_first_steps_do_not_decide_permanently() {
        // The first steps select kernels and allocate memory, so the loop does not wait for data.
        let first = Loop { compute: 900.0, work: 25.0, useful: 8, jitter: 0.0, bytes: 1 };
        let mut tuner = Tuner::new(LIMITS, 1, 2);
        first.run(&mut tuner, 100);
        assert_eq!((tuner.phase, tuner.workers), (Phase::Settled, 1));
        Loop { compute: 10.0, ..first }.run(&mut tuner, 100);
        assert_eq!((tuner.phase, tuner.workers), (Phase::Settled, 3));
        // A try that fell on slow steps and was taken back is repeated.
        let mut tuner = Tuner::new(LIMITS, 1, 2);
        Loop { compute: 10.0, ..first }.run(&mut tuner, 9);
        assert_eq!(tuner.workers, 2);
        first.run(&mut tuner, 9);
        assert_eq!(tuner.workers, 1);
        Loop { compute: 10.0, ..first }.run(&mut tuner, 100);
        assert_eq!((tuner.phase, tuner.workers), (Phase::Settled, 3));
    }

    #[test]
    fn prefetching_is_looked_at_again_too() {
        let first = Loop { compute: 900.0, work: 5.0, useful: 8, jitter: 8.0, bytes: 1 };
        let mut tuner = Tuner::new(Limits { tune_workers: false, tune_prefetch: true, ..LIMITS }, 1, 2);
        first.run(&mut tuner, 50);
        assert_eq!((tuner.phase, tuner.prefetch), (Phase::Settled, 2));
        Loop { compute: 10.0, ..first }.run(&mut tuner, 100);
        assert_eq!((tuner.phase, tuner.prefetch), (Phase::Settled, 8));
    }

    #[test]
    fn tries_that_gain_nothing_get_rarer() {
        // The disk is saturated by two workers, so the loop always waits.
        let bound = Loop { compute: 1.0, work: 100.0, useful: 2, jitter: 0.0, bytes: 1 };
        let mut tuner = Tuner::new(LIMITS, 1, 2);
        bound.run(&mut tuner, 2000);
        let (workers, others) = mostly(&mut tuner, bound, 10_000);
        assert_eq!(workers, 2);
        assert!((1..10_000 / 50).contains(&others), "{others}");
        assert_eq!(tuner.retry_after, MAX_RETRY_AFTER);
        // A faster disk is noticed.
        assert_eq!(mostly(&mut tuner, Loop { useful: 6, ..bound }, 10_000).0, 6);
    }

    #[test]
    fn a_fixed_size_stays() {
        let mut tuner = Tuner::new(Limits { tune_workers: false, ..LIMITS }, 2, 2);
        Loop { compute: 0.1, work: 100.0, useful: 8, jitter: 9.0, bytes: 1 }.run(&mut tuner, 500);
        assert_eq!((tuner.workers, tuner.prefetch), (2, 2));
    }

    #[test]
    fn a_long_pause_between_two_batches_decides_nothing() {
        let mut tuner = Tuner::new(LIMITS, 1, 2);
        let mut seen = [0; 9];
        for batch in 0..4000 {
            let period = if batch % 7 == 0 { 500.0 } else { 100.0 / tuner.workers.min(4) as f64 };
            tuner.observe(1, milliseconds(period), milliseconds(period));
            seen[tuner.workers] += usize::from(batch >= 200);
        }
        // Apart from four workers, only tries with five occur.
        assert!(seen[4] > 3500 && seen[4] + seen[5] == 3800, "{seen:?}");
    }

    #[test]
    fn prefetching_grows_against_bumps_within_the_budget() {
        assert_eq!(tuned(10.0, 5.0, 8, 0.0, 1).prefetch, 2);
        assert_eq!(tuned(10.0, 5.0, 8, 8.0, 1).prefetch, 8);
        let poor = tuned(10.0, 5.0, 8, 8.0, 400);
        assert_eq!(poor.size().in_flight, 2);
        assert_eq!(tuned(10.0, 5.0, 8, 0.0, 5000).size().in_flight, 1, "never none");
    }

    #[test]
    fn the_ranks_of_a_host_share_its_cores() {
        assert_eq!(share_of_cores(64, None), 64);
        assert_eq!(share_of_cores(64, Some(8)), 8);
        assert_eq!(share_of_cores(10, Some(4)), 2);
        assert_eq!((share_of_cores(2, Some(8)), share_of_cores(4, Some(0))), (1, 4));
        let ranks = |set: &'static [(&str, &str)]| {
            local_ranks(|name| set.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).to_owned()))
        };
        assert_eq!(ranks(&[]), None);
        assert_eq!(ranks(&[("LOCAL_WORLD_SIZE", "8"), ("WORLD_SIZE", "64")]), Some(8));
        assert_eq!(ranks(&[("OMPI_COMM_WORLD_LOCAL_SIZE", "4")]), Some(4));
        assert_eq!(ranks(&[("LOCAL_WORLD_SIZE", "many")]), None);
    }
}
