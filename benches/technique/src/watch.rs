//! What else uses the machine while a contender is timed, from `/proc`.

use std::collections::HashMap;
use std::sync::{Mutex, Once};
use std::thread;
use std::time::{Duration, Instant};

use overdrive_bench_report::Disturbance;
use procfs::process::{Process, Stat};
use procfs::{CurrentSI as _, KernelStats};

/// The pace is the best of so many timings of the fixed work.
const TRIES: usize = 3;
/// Calibrations of the pace before anything is timed.
const CALIBRATION: usize = 20;
/// Multiplications of the fixed work.
const WORK: u64 = 4_000_000;

/// Watches the machine during one timing.
pub struct Watch {
    begun: Instant,
    machine: Option<Machine>,
    own: f64,
    root: i32,
    pace: f64,
}

/// CPU seconds of the machine since it booted.
#[derive(Clone, Copy)]
struct Machine {
    busy: f64,
    stolen: f64,
}

impl Watch {
    /// Measures the pace of an idle machine, for at most two seconds, so that the first timings have something to be
    /// compared with.
    /// Once: later calls do nothing.
    pub fn calibrate() {
        static DONE: Once = Once::new();
        DONE.call_once(|| {
            wait_until_idle();
            for _ in 0..CALIBRATION {
                pace();
            }
        });
    }

    /// Starts to watch the process `root` and its descendants. First waits, for at most 1.5 s, until the machine is idle.
    pub fn start(root: u32) -> Self {
        wait_until_idle();
        let (pace, root) = (pace(), i32::try_from(root).unwrap_or_default());
        reset_peaks(root);
        Self { begun: Instant::now(), machine: machine(), own: cpu_seconds(root), root, pace }
    }

    /// Watches this process instead, which was started since.
    pub fn follow(&mut self, root: u32) {
        (self.root, self.own) = (i32::try_from(root).unwrap_or_default(), 0.0);
    }

    /// Stops. Returns what else used the machine, and the most memory that the processes have held.
    pub fn stop(self) -> (Disturbance, Option<u64>) {
        let (seconds, own, now) = (self.begun.elapsed().as_secs_f64(), cpu_seconds(self.root) - self.own, machine());
        let memory = peak_memory(self.root);
        // Workers of the contender still read ahead, which would slow the fixed work down.
        wait_until_idle();
        let pace = self.pace.min(pace());
        (disturbance(seconds, self.machine.zip(now), own, pace), memory)
    }
}

/// From what the machine and the contender used in so many seconds. Without `/proc/stat`, only the pace is known.
fn disturbance(seconds: f64, machine: Option<(Machine, Machine)>, own: f64, pace: f64) -> Disturbance {
    let Some((before, after)) = machine else { return Disturbance { pace, ..Disturbance::default() } };
    Disturbance {
        stolen_cpus: (after.stolen - before.stolen) / seconds,
        // The kernel counts in ticks of 10 ms, so a small negative number is rounding.
        other_cpus: (after.busy - before.busy - own).max(0.0) / seconds,
        pace,
    }
}

/// Waits, for at most 1.5 s, until the machine is idle.
pub fn wait_until_idle() {
    const INTERVAL: Duration = Duration::from_millis(60);
    const INTERVALS: usize = 25;
    for _ in 0..INTERVALS {
        let before = machine();
        thread::sleep(INTERVAL);
        let busy = before.zip(machine()).map_or(0.0, |(before, after)| after.busy - before.busy);
        if busy <= 0.2 * INTERVAL.as_secs_f64() {
            return;
        }
    }
}

fn seconds(ticks: u64) -> f64 {
    ticks as f64 / procfs::ticks_per_second() as f64
}

fn machine() -> Option<Machine> {
    let time = KernelStats::current().ok()?.total;
    // Time of virtual machines on this one is part of `user` and `nice`.
    let interrupts = time.irq.unwrap_or(0) + time.softirq.unwrap_or(0);
    let busy = time.user + time.nice + time.system + interrupts;
    Some(Machine { busy: seconds(busy), stolen: seconds(time.steal.unwrap_or(0)) })
}

/// A process and its descendants. Processes that end meanwhile are left out.
fn tree(root: i32) -> Vec<Stat> {
    let processes = procfs::process::all_processes().into_iter().flatten();
    let mut children: HashMap<i32, Vec<Stat>> = HashMap::new();
    let mut all = Vec::new();
    for stat in processes.filter_map(|process| process.ok()?.stat().ok()) {
        match stat.pid == root {
            true => all.push(stat),
            false => children.entry(stat.ppid).or_default().push(stat),
        }
    }
    let mut next = 0;
    while let Some(stat) = all.get(next) {
        all.extend(children.remove(&stat.pid).into_iter().flatten());
        next += 1;
    }
    all
}

/// CPU time of a process and its descendants, including those that have ended and were waited for.
fn cpu_seconds(root: i32) -> f64 {
    let ended = |stat: &Stat| u64::try_from(stat.cutime + stat.cstime).unwrap_or(0);
    tree(root).iter().map(|stat| seconds(stat.utime + stat.stime + ended(stat))).sum()
}

/// Sets the peaks of a process and its descendants back to what they hold now. Where that is not allowed, they stay
/// those since the processes began.
fn reset_peaks(root: i32) {
    for stat in tree(root) {
        let _ = std::fs::write(format!("/proc/{}/clear_refs", stat.pid), "5");
    }
}

/// The most memory that a process and its descendants have held: what they hold now, with shared pages counted once
/// (proportional set size), and how much more each had resident at its peak.
fn peak_memory(root: i32) -> Option<u64> {
    let peak = |stat: &Stat| {
        let process = Process::new(stat.pid).ok()?;
        let mapping = process.smaps_rollup().ok()?.memory_map_rollup.0.into_iter().next()?;
        let (held, status) = (mapping.extension.map.get("Pss").copied()?, process.status().ok()?);
        let above = status.vmhwm.zip(status.vmrss).map_or(0, |(peak, now)| peak.saturating_sub(now));
        Some(held + 1024 * above)
    };
    tree(root).iter().filter_map(peak).reduce(|sum, bytes| sum + bytes)
}

/// How fast fixed work runs on all cores at once, relative to the best time that this process has seen.
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
    fn what_the_contender_does_not_use_is_used_by_others() {
        let at = |busy, stolen| Machine { busy, stolen };
        let found = disturbance(2.0, Some((at(10.0, 1.0), at(13.0, 1.5))), 1.0, 0.9);
        assert_eq!(found, Disturbance { stolen_cpus: 0.25, other_cpus: 1.0, pace: 0.9 });
        assert!(found.is_too_much());
        // Rounding of ticks, and no /proc/stat.
        assert_eq!(disturbance(2.0, Some((at(10.0, 1.0), at(12.0, 1.0))), 2.01, 1.0), Disturbance::default());
        assert_eq!(disturbance(2.0, None, 1.0, 0.5).pace, 0.5);
    }

    #[test]
    fn a_process_is_watched_with_its_descendants() {
        let own = std::process::id();
        let root = i32::try_from(own).unwrap();
        let mut shell = std::process::Command::new("sh");
        // A child with a child; the echo says that both run.
        let mut child =
            shell.args(["-c", "sleep 1000 & echo; wait"]).stdout(std::process::Stdio::piped()).spawn().unwrap();
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut [0]).unwrap();
        let pids: Vec<i32> = tree(root).iter().map(|stat| stat.pid).collect();
        let below: Vec<i32> = tree(child.id() as i32).iter().map(|stat| stat.pid).collect();
        for pid in &below[1..] {
            kill(*pid);
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(pids.contains(&root) && below.len() == 2 && below.iter().all(|pid| pids.contains(pid)), "{below:?}");
        assert!(peak_memory(root).unwrap() > 1 << 20);
        // Its CPU time is its own.
        let begun = cpu_seconds(root);
        while cpu_seconds(root) < begun + 0.05 {
            work();
        }
    }

    #[test]
    fn memory_that_is_freed_before_the_end_counts() {
        const SIZE: u64 = 256 << 20; // large enough that other tests of this process do not matter
        let root = i32::try_from(std::process::id()).unwrap();
        let before = peak_memory(root).unwrap();
        drop(std::hint::black_box(vec![1_u8; SIZE as usize]));
        let after = peak_memory(root).unwrap();
        assert!(after >= before + SIZE / 2, "{before} to {after}");
        // Where the peak cannot be reset, it stays.
        if std::fs::write("/proc/self/clear_refs", "5").is_ok() {
            reset_peaks(root);
            let reset = peak_memory(root).unwrap();
            assert!(reset <= after - SIZE / 2, "{after} to {reset}");
        }
    }

    fn kill(pid: i32) {
        std::process::Command::new("kill").arg(pid.to_string()).status().unwrap();
    }
}
