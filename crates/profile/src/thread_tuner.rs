//! How many threads libtorch should compute with, found by trying.

use std::time::{Duration, Instant};

/// After each change of the number of threads, at least this many steps are not timed: libtorch starts or parks
/// threads.
const SETTLING: usize = 2;
/// How many steps are timed after that; their median counts.
const TIMED: usize = 7;
/// Threads take cores from a loader's workers. So a larger number of threads has to be this much faster to be chosen.
const MIN_GAIN: f64 = 0.03;

/// Finds the number of threads with which steps are fastest, and leaves libtorch set to it.
///
/// libtorch computes with as many threads as there are cores. Where a core is busy with something else, such as a
/// loader's worker, each operator waits for the thread on that core, and the other threads spin meanwhile: on 2 cores,
/// one of them busy, a step of a CNN took 33 to 60 ms with two threads, and 23 ms with one. Which number is best
/// depends on the model, the loader and the machine, so it is measured: ten steps each with all threads, one fewer, and
/// half of them.
///
/// ```
/// use overdrive_profile::ThreadTuner;
///
/// let mut tuner = ThreadTuner::new(tch::get_num_threads());
/// for batch in 0..100 {
///     // .. a training step ..
/// #   let _ = batch;
///     if let Some(threads) = tuner.step() {
///         println!("{threads} threads compute from here on");
///     }
/// }
/// ```
///
/// # Syncs
/// None by itself. On a GPU a step's time is the host's alone, and the number of threads matters little.
pub struct ThreadTuner {
    clock: Box<dyn Fn() -> Duration + Send>,
    set: Box<dyn Fn(i32) + Send>,
    /// How many steps with each number of threads are not timed.
    settling: usize,
    /// The numbers of threads to try; the first is being tried.
    left: Vec<i32>,
    /// The seconds that each step took with it.
    times: Vec<f64>,
    /// When the last step ended.
    last: Option<Duration>,
    /// The numbers of threads that were tried, each with the median seconds of a step.
    tried: Vec<(i32, f64)>,
}

impl ThreadTuner {
    /// Sets libtorch to `most` threads, at least 1, which are tried first. The trial begins with the next step.
    pub fn new(most: i32) -> Self {
        let start = Instant::now();
        Self::with(most, move || start.elapsed(), tch::set_num_threads)
    }

    fn with(most: i32, clock: impl Fn() -> Duration + Send + 'static, set: impl Fn(i32) + Send + 'static) -> Self {
        let most = most.max(1);
        let mut left = vec![most, (most - 1).max(1), (most / 2).max(1)];
        left.dedup();
        set(most);
        let (clock, set) = (Box::new(clock), Box::new(set));
        Self { clock, set, settling: SETTLING, left, times: Vec::new(), last: None, tried: Vec::new() }
    }

    /// The number of steps with each number of threads that are not timed, at least 2; default 2. Set it to as many
    /// batches as a loader's workers read ahead: those batches were prepared while another number of threads computed.
    pub fn settling_steps(mut self, steps: usize) -> Self {
        self.settling = steps.max(SETTLING);
        self
    }

    /// Call it at the end of each step. Returns the number of threads once, at the step at which it is decided.
    pub fn step(&mut self) -> Option<i32> {
        let &threads = self.left.first()?;
        let now = (self.clock)();
        if let Some(last) = self.last.replace(now) {
            self.times.push((now - last).as_secs_f64());
        }
        if self.times.len() < self.settling + TIMED {
            return None;
        }
        let mut timed = self.times.split_off(self.settling);
        timed.sort_by(f64::total_cmp);
        self.tried.push((threads, timed[TIMED / 2]));
        self.times.clear();
        self.last = None;
        self.left.remove(0);
        if let Some(&next) = self.left.first() {
            (self.set)(next);
            return None;
        }
        let best = self.best();
        (self.set)(best);
        Some(best)
    }

    /// The smallest number of threads that is within [`MIN_GAIN`] of the fastest.
    fn best(&self) -> i32 {
        let fastest = self.tried.iter().map(|(_, seconds)| *seconds).fold(f64::INFINITY, f64::min);
        let good = self.tried.iter().filter(|(_, seconds)| *seconds <= fastest * (1.0 + MIN_GAIN));
        good.map(|(threads, _)| *threads).min().unwrap_or(1)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// Steps whose milliseconds follow from the number of threads.
    fn chosen(most: i32, milliseconds: impl Fn(i32, usize) -> u64) -> (i32, i32) {
        let time = Arc::new(Mutex::new(Duration::ZERO));
        let threads = Arc::new(Mutex::new(0));
        let (clock, set) = (time.clone(), threads.clone());
        let mut tuner =
            ThreadTuner::with(most, move || *clock.lock().unwrap(), move |count| *set.lock().unwrap() = count);
        for step in 0.. {
            *time.lock().unwrap() += Duration::from_millis(milliseconds(*threads.lock().unwrap(), step));
            if let Some(chosen) = tuner.step() {
                assert_eq!(tuner.step(), None, "it decides once");
                return (chosen, *threads.lock().unwrap());
            }
        }
        unreachable!()
    }

    #[test]
    fn the_fastest_is_chosen_and_set() {
        assert_eq!(chosen(8, |threads, _| [0, 90, 80, 70, 30, 60, 60, 20, 60][threads as usize]), (7, 7));
        assert_eq!(chosen(8, |threads, _| 100 / threads as u64), (8, 8));
        assert_eq!(chosen(2, |threads, _| if threads == 2 { 60 } else { 23 }), (1, 1));
    }

    #[test]
    fn fewer_threads_win_where_more_gain_nothing_and_a_slow_step_now_and_then_does_not_count() {
        assert_eq!(chosen(4, |threads, _| if threads == 4 { 100 } else { 102 }), (2, 2));
        assert_eq!(chosen(2, |threads, step| if step % 5 == 0 { 1000 } else { 40 / threads as u64 }), (2, 2));
    }

    #[test]
    fn batches_that_were_read_ahead_do_not_count() {
        // Eight batches are there at once whatever computes; then one thread is faster.
        let time = Arc::new(Mutex::new(Duration::ZERO));
        let (clock, threads) = (time.clone(), Arc::new(Mutex::new((0, 0))));
        let set = threads.clone();
        let tuner =
            ThreadTuner::with(2, move || *clock.lock().unwrap(), move |count| *set.lock().unwrap() = (count, 0));
        let mut tuner = tuner.settling_steps(8);
        let chosen = loop {
            let (count, step) = *threads.lock().unwrap();
            threads.lock().unwrap().1 += 1;
            let ahead = [5, 50][usize::from(count == 1)];
            let steady = [60, 23][usize::from(count == 1)];
            *time.lock().unwrap() += Duration::from_millis(if step < 8 { ahead } else { steady });
            if let Some(chosen) = tuner.step() {
                break chosen;
            }
        };
        assert_eq!(chosen, 1);
    }

    #[test]
    fn one_core_has_no_choice() {
        assert_eq!(chosen(1, |_, _| 5), (1, 1));
        assert_eq!(chosen(-3, |_, _| 5), (1, 1));
    }
}
