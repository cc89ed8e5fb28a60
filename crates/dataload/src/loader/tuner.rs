//! Finds how many workers and how much prefetching a training loop needs, from what it waits for.

use std::time::Duration;

/// The number of workers and of batches that they may be ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size {
    pub(crate) workers: usize,
    pub(crate) in_flight: usize,
}

/// Climbs from one worker upwards for as long as the training loop waits and gets faster by it, and then raises the
/// prefetching in the same way. Where the loop waits later all the same, it looks again: first steps are slow and tell
/// little. What gains nothing is tried more and more seldom.
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
    /// Rounds that the loop has waited in since it settled, and how many it is to wait in before the next try.
    waited: usize,
    patience: usize,
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
/// Rounds in which a settled loop waits before something is tried again, at first and at most: a try that gains nothing
/// doubles them, so that tries cost next to nothing in the end.
const FIRST_PATIENCE: usize = 2;
const MOST_PATIENCE: usize = 64;

/// How many of the `cores` that this process may use are its own where `local_ranks` processes like it run on the host.
pub(crate) fn share_of_cores(cores: usize, local_ranks: Option<usize>) -> usize {
    (cores / local_ranks.unwrap_or(1).max(1)).max(1)
}

/// How many ranks the launcher says to have started on this host: `var` gives a variable of the environment.
pub(crate) fn local_ranks(var: impl Fn(&str) -> Option<String>) -> Option<usize> {
    // Those of torchrun and overdrive-run, and of Open MPI. Slurm gives each task its cores.
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
        let (round, before, patience) = (Round::default(), None, FIRST_PATIENCE);
        Self { limits, workers, prefetch, batch_bytes: 0, phase, round, before, waited: 0, patience }
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
        if self.limits.tune_workers || self.limits.tune_prefetch {
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
        if self.phase == Phase::Settled && !self.looks_again(waiting) {
            return;
        }
        let tried = self.before.take();
        let gained = tried.is_none_or(|before| rate > before * WORTH);
        match (tried, gained) {
            (Some(_), true) => self.patience = FIRST_PATIENCE,
            (Some(_), false) => {
                self.patience = (2 * self.patience).min(MOST_PATIENCE);
                match self.phase {
                    Phase::Workers => self.workers -= 1,
                    Phase::Prefetch | Phase::Settled => self.prefetch /= 2,
                }
            }
            (None, _) => {}
        }
        let more = gained && waiting > ENOUGH;
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

    /// Whether a settled loop has waited long enough to try something again.
    fn looks_again(&mut self, waiting: f64) -> bool {
        self.waited += usize::from(waiting > ENOUGH);
        if self.waited <= self.patience {
            return false;
        }
        self.waited = 0;
        self.phase = if self.limits.tune_workers { Phase::Workers } else { Phase::Prefetch };
        waiting > ENOUGH
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

    const LIMITS: Limits =
        Limits { max_workers: 8, tune_workers: true, tune_prefetch: false, memory_budget: 1000, counts_bytes: true };

    fn milliseconds(time: f64) -> Duration {
        Duration::from_secs_f64(time / 1e3)
    }

    /// A made-up training loop, in milliseconds.
    #[derive(Clone, Copy)]
    struct Loop {
        /// What the training itself takes for a batch.
        compute: f64,
        /// What one worker takes for a batch, and how many of them do not get in each other's way.
        work: f64,
        useful: usize,
        /// What is left of the wait unless the prefetch reaches 8.
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

    /// The number of workers at most of the last `batches`, and how many of these had another.
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
    fn slow_first_steps_do_not_decide_for_good() {
        // Kernels are chosen and memory is taken in the first steps: nobody waits for data then.
        let first = Loop { compute: 900.0, work: 25.0, useful: 8, jitter: 0.0, bytes: 1 };
        let mut tuner = Tuner::new(LIMITS, 1, 2);
        first.run(&mut tuner, 100);
        assert_eq!((tuner.phase, tuner.workers), (Phase::Settled, 1));
        Loop { compute: 10.0, ..first }.run(&mut tuner, 100);
        assert_eq!((tuner.phase, tuner.workers), (Phase::Settled, 3));
        // A try that fell on slow steps, and was taken back.
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
    fn what_gains_nothing_is_tried_more_and_more_seldom() {
        // The disk gives no more than two workers can take, so that the loop always waits.
        let bound = Loop { compute: 1.0, work: 100.0, useful: 2, jitter: 0.0, bytes: 1 };
        let mut tuner = Tuner::new(LIMITS, 1, 2);
        bound.run(&mut tuner, 2000);
        let (workers, others) = mostly(&mut tuner, bound, 10_000);
        assert_eq!(workers, 2);
        assert!((1..10_000 / 50).contains(&others), "{others}");
        assert_eq!(tuner.patience, MOST_PATIENCE);
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
        // Beside four there are only the tries with one more.
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
