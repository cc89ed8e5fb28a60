//! Waiting for batches.

use super::LEAST_SHARE;
use super::facts::Facts;
use super::finding::{Bottleneck, Finding};
use super::watched::ThreadUse;
use crate::Phase;

/// The names of `overdrive-dataload`'s threads begin like this.
const WORKERS: [&str; 2] = ["dataload-", "parquet-"];
/// Workers that are on a CPU, or wait for one, for less of the time than this wait for a disk.
const BUSY: f64 = 0.5;
/// Fewer free CPUs than this are not enough for another worker.
const LEAST_FREE_CPUS: f64 = 0.25;

pub(super) fn findings(facts: &Facts<'_>) -> Vec<Finding> {
    let waiting = facts.seconds(Phase::DataWait);
    let Some(cause) = Cause::of(facts, waiting) else { return Vec::new() };
    let seconds = match cause.bottleneck {
        // More workers cannot save more than the free CPUs can do.
        Bottleneck::TooFewWorkers => waiting.min(room_for_workers(facts)),
        _ => waiting,
    };
    // The workers' scopes, if there are any, else those of the training thread.
    let of_workers = facts.scope_of_workers(waiting);
    let own = || facts.scope_of_phases(&[Phase::DataWait]).or_else(|| facts.scope_of_own_loading(waiting));
    let finding = facts.finding(cause.bottleneck, seconds).map(|finding| {
        let mut finding = finding
            .scope(of_workers.map(|(scope, _)| scope).or_else(own))
            .evidence(format!("the step waits for its batch for {}", facts.of_step(waiting)))
            .evidence(cause.evidence)
            .remedy(cause.remedy);
        if let Some((scope, seconds)) = of_workers {
            let each = format!("loading threads spend {:.2} ms per step in the scope `{scope}`", 1e3 * seconds);
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
        // Workers end with each epoch and start again, so on average there are fewer than the loader has.
        let alive: f64 = workers.iter().map(|thread| thread.count).sum();
        let has_room = free.is_some_and(|free| free >= LEAST_FREE_CPUS)
            && room_for_workers(facts) >= LEAST_SHARE * facts.step_seconds;
        if alive <= 0.0 {
            return Self::without_workers(facts, waiting, has_room);
        }
        let at_work: f64 = workers.iter().map(|thread| thread.busy + thread.queued).sum();
        let workers = workers.len();
        let evidence = format!(
            "{workers} workers are busy for {:.0}% of the time, and {free_text} of {} CPUs are free",
            100.0 * at_work / alive,
            facts.run.machine.cpus
        );
        let read = facts.samples.iter().filter_map(|it| it.process?.rates?.disk_read_bytes_per_second);
        let read = super::facts::mean(read).map(|bytes| format!("; {:.1} MB/s are read from disks", bytes / 1e6));
        if at_work < BUSY * alive {
            return Some(Self {
                bottleneck: Bottleneck::SlowRead,
                evidence: evidence + &read.unwrap_or_default(),
                remedy: format!(
                    "read more files at once: `.num_workers({})`; or cache samples: `Cached`, `DiskCached`, or tar \
                     shards instead of small files",
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
                    "make samples cheaper: decode once and cache them (`Cached`, `DiskCached`), decode to a smaller \
                         size, build with the feature `libjpeg-turbo`"
                        .to_owned(),
            }
        })
    }

    /// The training thread loads by itself, or waits for loading threads of another library.
    fn without_workers(facts: &Facts<'_>, waiting: f64, has_room: bool) -> Option<Self> {
        let main = facts.main_thread()?;
        // Threads of libtorch's pool have the training thread's name, and are busy when it is. Threads that the program
        // did not name have that name too.
        let work = |it: &ThreadUse<'_>| match it.name == main.name {
            true => (it.busy + it.queued - it.count * (main.busy + main.queued)).max(0.0),
            false => it.busy + it.queued,
        };
        let others: f64 = facts.threads.iter().filter(|it| !it.is_main).map(work).sum();
        let share = waiting / facts.step_seconds;
        let blocked = (1.0 - main.busy - main.queued).clamp(0.0, 1.0);
        let is_blocked = blocked >= BUSY * share;
        let evidence = format!(
            "there are no loader workers; the training thread is blocked for {:.0}% of the time, and other threads \
             use {others:.1} CPUs",
            100.0 * blocked
        );
        let (bottleneck, remedy) = match (is_blocked, has_room) {
            (true, _) if others < BUSY => (
                Bottleneck::SlowRead,
                "read in the background: `DataLoader::builder(dataset).num_workers(4)`; or cache samples: `Cached`, \
                 `DiskCached`",
            ),
            (_, true) => (
                Bottleneck::TooFewWorkers,
                "load in the background: `DataLoader::builder(dataset).num_workers(2)`, or `.num_workers(Auto)`",
            ),
            _ => (
                Bottleneck::SlowDecode,
                "make samples cheaper: decode once and cache them (`Cached`, `DiskCached`), or decode to a smaller \
                 size",
            ),
        };
        Some(Self { bottleneck, evidence, remedy: remedy.to_owned() })
    }
}

/// Seconds of a step that would be saved if its work were spread over all CPUs.
fn room_for_workers(facts: &Facts<'_>) -> f64 {
    let Some(free) = facts.free_cpus() else { return facts.step_seconds };
    facts.step_seconds * free / f64::from(facts.run.machine.cpus.max(1))
}
