//! Waiting for batches.

use super::LEAST_SHARE;
use super::facts::Facts;
use super::finding::{Bottleneck, Finding};
use super::watched::ThreadUse;
use crate::Phase;

/// How the threads of `overdrive-dataload` are called.
const WORKERS: [&str; 2] = ["dataload-", "parquet-"];
/// Workers that are on a CPU, or wait for one, for more of the time than this are not waiting for a disk.
const BUSY: f64 = 0.5;
/// A CPU that is free for less of the time is no room for a worker.
const LEAST_FREE_CPUS: f64 = 0.25;

pub(super) fn findings(facts: &Facts<'_>) -> Vec<Finding> {
    let waiting = facts.seconds(Phase::DataWait);
    let Some(cause) = Cause::of(facts, waiting) else { return Vec::new() };
    let seconds = match cause.bottleneck {
        // More workers only spread the same work over the CPUs.
        Bottleneck::TooFewWorkers => waiting.min(room_for_workers(facts)),
        _ => waiting,
    };
    // Workers' scopes, where there are workers, else those of the thread that trains.
    let of_workers = facts.scope_of_workers(waiting);
    let own = || facts.scope_of_phases(&[Phase::DataWait]).or_else(|| facts.scope_of_own_loading(waiting));
    let finding = facts.finding(cause.bottleneck, seconds).map(|finding| {
        let mut finding = finding
            .scope(of_workers.map(|(scope, _)| scope).or_else(own))
            .evidence(format!("the step waits for its batch for {}", facts.of_step(waiting)))
            .evidence(cause.evidence)
            .remedy(cause.remedy);
        if let Some((scope, seconds)) = of_workers {
            let each = format!("threads that load spend {:.2} ms a step in the scope `{scope}`", 1e3 * seconds);
            finding = finding.evidence(each);
        }
        finding
    });
    finding.into_iter().collect()
}

struct Cause {
    bottleneck: Bottleneck,
    evidence: String,
    remedy: String,
}

impl Cause {
    /// None without samples of threads.
    fn of(facts: &Facts<'_>, waiting: f64) -> Option<Self> {
        let is_worker = |thread: &&ThreadUse<'_>| WORKERS.iter().any(|name| thread.name.starts_with(name));
        let workers: Vec<_> = facts.threads.iter().filter(is_worker).collect();
        let free = facts.free_cpus();
        let free_text = free.map_or_else(|| "unknown".to_owned(), |free| format!("{free:.1}"));
        // They end with an epoch, and begin again: on the mean there are fewer than the loader was told.
        let alive: f64 = workers.iter().map(|thread| thread.count).sum();
        let has_room = free.is_some_and(|free| free >= LEAST_FREE_CPUS)
            && room_for_workers(facts) >= LEAST_SHARE * facts.step_seconds;
        if alive <= 0.0 {
            return Self::without_workers(facts, waiting, has_room);
        }
        let at_work: f64 = workers.iter().map(|thread| thread.busy + thread.queued).sum();
        let workers = workers.len();
        let evidence = format!(
            "{workers} workers are at work for {:.0}% of the time, and {free_text} of {} CPUs are left over",
            100.0 * at_work / alive,
            facts.run.machine.cpus
        );
        let read = facts.samples.iter().filter_map(|it| it.process?.rates?.disk_read_bytes_per_second);
        let read = super::facts::mean(read).map(|bytes| format!("; {:.1} MB/s come from disks", bytes / 1e6));
        if at_work < BUSY * alive {
            return Some(Self {
                bottleneck: Bottleneck::SlowRead,
                evidence: evidence + &read.unwrap_or_default(),
                remedy: format!(
                    "let more reads wait at once: `.num_workers({})`; or keep samples: `Cached`, `DiskCached`, tar shards \
                     in place of small files",
                    (2 * workers).max(4)
                ),
            });
        }
        Some(if has_room {
            Self {
                bottleneck: Bottleneck::TooFewWorkers,
                evidence,
                remedy: format!(
                    "`.num_workers({})`, or `.num_workers(Auto)`",
                    workers + free.map_or(1, |free| free.ceil() as usize)
                ),
            }
        } else {
            Self {
                bottleneck: Bottleneck::SlowDecode,
                evidence,
                remedy:
                    "make samples cheaper: decode once and keep them (`Cached`, `DiskCached`), decode to a smaller \
                         size, build with the feature `libjpeg-turbo`"
                        .to_owned(),
            }
        })
    }

    /// The thread that trains loads by itself, or waits for threads that nobody knows.
    fn without_workers(facts: &Facts<'_>, waiting: f64, has_room: bool) -> Option<Self> {
        let main = facts.main_thread()?;
        // libtorch's own threads have the name of the one that they help, and work while it does; so have threads that the program
        // gave no name.
        let work = |it: &ThreadUse<'_>| match it.name == main.name {
            true => (it.busy + it.queued - it.count * (main.busy + main.queued)).max(0.0),
            false => it.busy + it.queued,
        };
        let others: f64 = facts.threads.iter().filter(|it| !it.is_main).map(work).sum();
        let share = waiting / facts.step_seconds;
        let blocked = (1.0 - main.busy - main.queued).clamp(0.0, 1.0);
        let is_blocked = blocked >= BUSY * share;
        let evidence = format!(
            "no worker of a loader was seen; the thread that trains is blocked for {:.0}% of the time, and other threads use \
             {others:.1} CPUs",
            100.0 * blocked
        );
        let (bottleneck, remedy) = match (is_blocked, has_room) {
            (true, _) if others < BUSY => (
                Bottleneck::SlowRead,
                "let reads wait beside the steps: `DataLoader::builder(dataset).num_workers(4)`; or keep samples: \
                 `Cached`, `DiskCached`",
            ),
            (_, true) => (
                Bottleneck::TooFewWorkers,
                "load beside the steps: `DataLoader::builder(dataset).num_workers(2)`, or `.num_workers(Auto)`",
            ),
            _ => (
                Bottleneck::SlowDecode,
                "make samples cheaper: decode once and keep them (`Cached`, `DiskCached`), or decode to a smaller size",
            ),
        };
        Some(Self { bottleneck, evidence, remedy: remedy.to_owned() })
    }
}

/// Seconds of a step that go away if its work were spread over all CPUs.
fn room_for_workers(facts: &Facts<'_>) -> f64 {
    let Some(free) = facts.free_cpus() else { return facts.step_seconds };
    facts.step_seconds * free / f64::from(facts.run.machine.cpus.max(1))
}
