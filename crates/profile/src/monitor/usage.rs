//! Reads the kernel's figures of the machine and of this process.

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike as _;
use procfs::process::Process;
use procfs::{Current as _, CurrentSI as _, KernelStats, LoadAverage, Meminfo, ProcResult, VmStat};

use super::{Counters, ProcessSample, SystemSample, ThreadSample};

/// The machine, without rates.
pub(super) fn system() -> ProcResult<SystemSample> {
    let (kernel, load, memory) = (KernelStats::current()?, LoadAverage::current()?, Meminfo::current()?);
    let VmStat(pages) = VmStat::current()?;
    let page_count = |name: &str| pages.get(name).and_then(|count| u64::try_from(*count).ok());
    let time = &kernel.total;
    let more = [time.irq, time.softirq, time.steal].into_iter().flatten().fold(0, u64::saturating_add);
    // Guests' time is part of `user`.
    let ticks = time.user.saturating_add(time.nice).saturating_add(time.system).saturating_add(more);
    Ok(SystemSample {
        cpus: u32::try_from(kernel.cpu_time.len()).unwrap_or(u32::MAX),
        load1: f64::from(load.one),
        load5: f64::from(load.five),
        load15: f64::from(load.fifteen),
        memory_total_bytes: memory.mem_total,
        memory_available_bytes: memory.mem_available,
        counters: Counters {
            cpu_seconds: ticks as f64 / procfs::ticks_per_second() as f64,
            // In KiB. Each request to a disk is counted once, however many block layers (RAID, LVM) there are.
            disk_read_bytes: page_count("pgpgin").map(|kib| kib.saturating_mul(1024)),
            disk_written_bytes: page_count("pgpgout").map(|kib| kib.saturating_mul(1024)),
            context_switches: kernel.ctxt,
            page_faults: page_count("pgfault").unwrap_or(0),
            major_page_faults: page_count("pgmajfault").unwrap_or(0),
        },
        rates: None,
    })
}

/// This process, without rates.
pub(super) fn process() -> ProcResult<ProcessSample> {
    let process = Process::myself()?;
    let stat = process.stat()?;
    let kib = process.status().map(|status| status.rssanon.zip(status.rssshmem));
    let anonymous = kib.ok().flatten().map(|(anonymous, shared)| anonymous.saturating_add(shared).saturating_mul(1024));
    // Some containers forbid it.
    let io = process.io().ok();
    // Includes threads that have ended, which /proc does not.
    let usage = getrusage(UsageWho::RUSAGE_SELF).map_err(std::io::Error::from)?;
    let count = |number: i64| u64::try_from(number).unwrap_or(0);
    let switches = usage.voluntary_context_switches().saturating_add(usage.involuntary_context_switches());
    let (minor, major) = (count(usage.minor_page_faults()), count(usage.major_page_faults()));
    Ok(ProcessSample {
        resident_memory_bytes: stat.rss.saturating_mul(procfs::page_size()),
        anonymous_memory_bytes: anonymous,
        threads: count(stat.num_threads),
        counters: Counters {
            cpu_seconds: (usage.user_time() + usage.system_time()).num_microseconds() as f64 / 1e6,
            disk_read_bytes: io.as_ref().map(|io| io.read_bytes),
            disk_written_bytes: io.map(|io| io.write_bytes),
            context_switches: count(switches),
            page_faults: minor.saturating_add(major),
            major_page_faults: major,
        },
        rates: None,
    })
}

/// Seconds that this thread was ready to run, but waited for a CPU, since it was started.
pub(crate) fn queued_seconds_of_this_thread() -> ProcResult<f64> {
    let times = Process::myself()?.task_from_tid(rustix::thread::gettid().as_raw_pid())?.schedstat()?;
    Ok(times.run_delay as f64 / 1e9)
}

/// The least busy threads beyond this number are left out.
const MOST_THREADS: usize = 64;

/// The threads of this process, without those that end meanwhile.
pub(super) fn threads() -> ProcResult<Vec<ThreadSample>> {
    let of_task = |task: procfs::process::Task| -> ProcResult<ThreadSample> {
        let times = task.schedstat()?;
        Ok(ThreadSample {
            id: task.tid,
            name: task.stat()?.comm,
            cpu_seconds: times.sum_exec_runtime as f64 / 1e9,
            queued_seconds: times.run_delay as f64 / 1e9,
        })
    };
    let mut threads: Vec<_> = Process::myself()?.tasks()?.filter_map(|task| of_task(task.ok()?).ok()).collect();
    threads.sort_by(|one, other| other.cpu_seconds.total_cmp(&one.cpu_seconds));
    threads.truncate(MOST_THREADS);
    Ok(threads)
}
