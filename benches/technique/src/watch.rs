//! What the machine does while a contender's time is taken, by `/proc`.

use std::collections::HashMap;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use overdrive_bench_report::Disturbance;

/// How many times of fixed work tell the pace, the best of them.
const TRIES: usize = 3;
/// Additions of one time.
const WORK: u64 = 4_000_000;

/// Watches one measured time.
pub struct Watch {
    begun: Instant,
    machine: Option<Machine>,
    own: f64,
    root: u32,
    pace: f64,
}

/// Seconds of CPU time since the machine started.
#[derive(Clone, Copy)]
struct Machine {
    busy: f64,
    stolen: f64,
}

impl Watch {
    /// From now on, of a process and all below it. Waits a little for the machine to come to rest.
    pub fn start(root: u32) -> Self {
        come_to_rest();
        let pace = pace();
        Self { begun: Instant::now(), machine: machine(), own: cpu_seconds(root), root, pace }
    }

    /// What else used the machine until now, and the memory that the processes take.
    pub fn stop(self) -> (Disturbance, Option<u64>) {
        let (seconds, own, now) = (self.begun.elapsed().as_secs_f64(), cpu_seconds(self.root) - self.own, machine());
        let memory = memory(self.root);
        // The contender's own workers read ahead.
        come_to_rest();
        let (stolen_cpus, other_cpus) = match self.machine.zip(now) {
            Some((before, after)) => {
                // The kernel counts ticks of 10 ms.
                let others = (after.busy - before.busy - own).max(0.0);
                ((after.stolen - before.stolen) / seconds, others / seconds)
            }
            // Unknown is not quiet, but the pace tells something.
            None => (0.0, 0.0),
        };
        (Disturbance { stolen_cpus, other_cpus, pace: self.pace.min(pace()) }, memory)
    }
}

/// Waits until next to nothing runs; not for long, because that may never be.
fn come_to_rest() {
    const LOOK: Duration = Duration::from_millis(60);
    const LOOKS: usize = 25;
    for _ in 0..LOOKS {
        let before = machine();
        thread::sleep(LOOK);
        let busy = before.zip(machine()).map_or(0.0, |(before, after)| after.busy - before.busy);
        if busy <= 0.2 * LOOK.as_secs_f64() {
            return;
        }
    }
}

fn ticks_per_second() -> f64 {
    100.0
}

fn machine() -> Option<Machine> {
    let stat = std::fs::read_to_string("/proc/stat").ok()?;
    let numbers: Vec<f64> =
        stat.lines().next()?.split_whitespace().skip(1).map_while(|number| number.parse().ok()).collect();
    // user, nice, system, idle, iowait, irq, softirq, steal; those of virtual machines are in user and nice.
    let at = |index: usize| numbers.get(index).copied().unwrap_or(0.0) / ticks_per_second();
    Some(Machine { busy: at(0) + at(1) + at(2) + at(5) + at(6), stolen: at(7) })
}

/// The processes below one, itself first.
fn tree(root: u32) -> Vec<u32> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(process) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        if let Some(parent) = stat(process).and_then(|fields| fields.get(1)?.parse().ok()) {
            children.entry(parent).or_default().push(process);
        }
    }
    let (mut all, mut next) = (vec![root], 0);
    while let Some(process) = all.get(next) {
        all.extend(children.get(process).into_iter().flatten().copied().collect::<Vec<u32>>());
        next += 1;
    }
    all
}

/// The fields of `/proc/PID/stat` after the program's name: state, parent, ..
fn stat(process: u32) -> Option<Vec<String>> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    Some(stat.rsplit_once(')')?.1.split_whitespace().map(str::to_owned).collect())
}

/// CPU time of a process and all below it, those that have ended and were waited for too.
fn cpu_seconds(root: u32) -> f64 {
    let of = |process: u32| {
        let fields = stat(process)?;
        // utime, stime, cutime, cstime.
        Some(fields.get(11..15)?.iter().filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>())
    };
    tree(root).into_iter().filter_map(of).sum::<f64>() / ticks_per_second()
}

/// Memory of a process and all below it; what several share is counted once.
fn memory(root: u32) -> Option<u64> {
    let of = |process: u32| {
        let rollup = std::fs::read_to_string(format!("/proc/{process}/smaps_rollup")).ok()?;
        let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"))?;
        Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
    };
    let each: Vec<u64> = tree(root).into_iter().filter_map(of).collect();
    (!each.is_empty()).then(|| each.into_iter().sum())
}

/// How fast a fixed piece of work goes on all cores at once, of the best that this process has seen.
fn pace() -> f64 {
    static BEST: Mutex<Duration> = Mutex::new(Duration::MAX);
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let once = || {
        let begun = Instant::now();
        thread::scope(|scope| (0..cores).for_each(|_| drop(scope.spawn(work))));
        begun.elapsed()
    };
    let took = (0..TRIES).map(|_| once()).min().unwrap_or(Duration::MAX);
    let mut best = BEST.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    *best = best.min(took);
    best.as_secs_f64() / took.as_secs_f64()
}

fn work() {
    let sum = (0..std::hint::black_box(WORK)).fold(1u64, |sum, number| sum.wrapping_mul(31).wrapping_add(number));
    std::hint::black_box(sum);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_watched_with_its_children() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let own = std::process::id();
        assert!(tree(own).contains(&child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
        let watch = Watch::start(own);
        let begun = cpu_seconds(own);
        while cpu_seconds(own) < begun + 0.2 {
            work();
        }
        let (disturbance, memory) = watch.stop();
        assert!(disturbance.pace > 0.0 && disturbance.pace <= 1.0 && disturbance.stolen_cpus >= 0.0, "{disturbance:?}");
        assert!(memory.unwrap() > 1 << 20);
    }
}
