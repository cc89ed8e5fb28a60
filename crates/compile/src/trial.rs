//! Compiled steps beside uncompiled ones: which are faster.

use std::collections::BTreeSet;
use std::fmt::{self, Display, Formatter};
use std::time::{Duration, Instant};

/// How a step runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Compiled,
    Uncompiled,
}

/// Steps of each way that are timed, after one that is not.
const STEPS: usize = 9;

/// Steps in turns, both ways.
#[derive(Debug, Default)]
pub(crate) struct Trial {
    /// The GPUs that a step computes on. Waiting for another one would make a context there.
    gpus: BTreeSet<usize>,
    times: [Vec<Duration>; 2],
    running: Option<(Way, Instant)>,
}

/// The result of a trial.
#[derive(Debug)]
pub(crate) struct Verdict {
    pub(crate) faster: Way,
    compiled: Duration,
    uncompiled: Duration,
}

impl Trial {
    /// Of steps that compute on these GPUs.
    pub(crate) fn new(gpus: BTreeSet<usize>) -> Self {
        Self { gpus, ..Self::default() }
    }

    fn wait_for_gpus(&self) {
        self.gpus.iter().for_each(|gpu| tch::Cuda::synchronize(*gpu as i64));
    }

    /// Begins a step, and says which way it has to run.
    pub(crate) fn begin(&mut self) -> Way {
        let way = if self.times[0].len() <= self.times[1].len() { Way::Compiled } else { Way::Uncompiled };
        self.wait_for_gpus();
        self.running = Some((way, Instant::now()));
        way
    }

    /// Ends the step that was begun; the verdict once there are enough.
    pub(crate) fn end(&mut self) -> Option<Verdict> {
        let (way, begun) = self.running.take()?;
        self.wait_for_gpus();
        self.add(way, begun.elapsed())
    }

    fn add(&mut self, way: Way, time: Duration) -> Option<Verdict> {
        self.times[way as usize].push(time);
        if self.times.iter().any(|times| times.len() <= STEPS) {
            return None;
        }
        let [compiled, uncompiled] = self.times.each_ref().map(|times| median(&times[1..]));
        let faster = if compiled < uncompiled { Way::Compiled } else { Way::Uncompiled };
        Some(Verdict { faster, compiled, uncompiled })
    }
}

fn median(times: &[Duration]) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort();
    sorted[sorted.len() / 2]
}

impl Display for Verdict {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let way = if self.faster == Way::Compiled { "compiled" } else { "uncompiled" };
        let (compiled, uncompiled) = (ms(self.compiled), ms(self.uncompiled));
        write!(f, "a step takes {compiled:.3} ms compiled and {uncompiled:.3} ms uncompiled: it runs {way} from now on")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(compiled: u64, uncompiled: u64) -> Verdict {
        let mut trial = Trial::default();
        for number in 0.. {
            let way = trial.begin();
            // The first of each is slow, and one of the others.
            let slow = if [0, 1, 7].contains(&number) { 1000 } else { 0 };
            let time = if way == Way::Compiled { compiled } else { uncompiled };
            if let Some(verdict) = trial.add(way, Duration::from_micros(time + slow)) {
                assert_eq!(number + 1, 2 * (STEPS + 1));
                return verdict;
            }
        }
        unreachable!("it never ends")
    }

    #[test]
    fn the_faster_way_is_taken_and_said() {
        let text = verdict(400, 700).to_string();
        assert_eq!(text, "a step takes 0.400 ms compiled and 0.700 ms uncompiled: it runs compiled from now on");
        assert_eq!(verdict(700, 400).faster, Way::Uncompiled);
    }
}
