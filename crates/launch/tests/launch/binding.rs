//! Ranks bound to CPUs. The unit tests of `numa` compute the CPUs of hosts with GPUs and several NUMA nodes.

use std::collections::BTreeSet;
use std::fs;

use rustix::thread::{CpuSet, sched_getaffinity};

use crate::launcher::{Ended, Launcher};

crate::tests![
    ranks_may_use_their_cpus_only,
    exclusive_ranks_share_no_cpu,
    a_rank_without_a_gpu_is_an_error_before_anything_starts,
];

const SHOW: &str = "sed -n 's/^Cpus_allowed_list:\\t//p' /proc/self/status";

/// Ranks that say which CPUs they may use. No GPU is visible to them, so that this host's GPUs do not matter.
fn bound(options: &[&str], script: &str) -> Ended {
    Launcher::script(options, script).env("CUDA_VISIBLE_DEVICES", "").end()
}

/// What the launcher says about the CPUs of its ranks, and what they say themselves.
fn cpus(ended: &Ended) -> [Vec<String>; 2] {
    let said = ended.err.lines().find_map(|line| line.strip_prefix("overdrive-run: CPUs of the local ranks: "));
    let said = said.unwrap().split("; ").map(str::to_owned).collect();
    let mut lines = ended.sorted();
    [said, lines.iter_mut().map(|line| line.split_once(": ").unwrap().1.to_owned()).collect()]
}

fn numbers(list: &str) -> BTreeSet<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        first.parse::<usize>().unwrap()..=last.parse().unwrap()
    };
    list.split(',').flat_map(range).collect()
}

fn own_cpus() -> String {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim().to_owned()
}

/// Without CPUs that are offline, which Linux may list as allowed.
fn own_online_cpus() -> BTreeSet<usize> {
    let set = sched_getaffinity(None).unwrap();
    (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()
}

/// As Linux writes them, like `0-2,4`.
fn list(cpus: &BTreeSet<usize>) -> String {
    let starts = cpus.iter().filter(|cpu| **cpu == 0 || !cpus.contains(&(**cpu - 1)));
    let range = |first: &usize| {
        let last = (*first..).take_while(|cpu| cpus.contains(cpu)).last().unwrap();
        if last == *first { last.to_string() } else { format!("{first}-{last}") }
    };
    starts.map(range).collect::<Vec<_>>().join(",")
}

fn ranks_may_use_their_cpus_only() {
    let own = own_online_cpus();
    for mode in ["node", "socket"] {
        // A child of the rank inherits them; the guard itself is not bound for longer than a rank's start.
        let script = format!(
            "sh -c \"{}\"; until grep -q \"^Cpus_allowed_list:.*[[:space:]]{}$\" /proc/$PPID/status; do sleep 0.01; done",
            SHOW.replace('\\', "\\\\"),
            list(&own)
        );
        let ended = bound(&["--nproc-per-node=2", &format!("--numa-binding={mode}")], &script);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        ended.says(" ranks (a rank's CPUs divided by the ranks that share them)");
        let [said, seen] = cpus(&ended);
        assert_eq!(said, seen);
        assert!(seen.iter().all(|list| numbers(list).is_subset(&own)), "{seen:?}");
    }
    // Unless asked for, nothing is bound.
    let ended = bound(&[], SHOW);
    assert_eq!(
        (ended.out.as_str(), ended.err.contains("CPUs")),
        (format!("[rank0]: {}\n", own_cpus()).as_str(), false)
    );
}

fn exclusive_ranks_share_no_cpu() {
    let ended = bound(&["--nproc-per-node=2", "--numa_binding=exclusive"], SHOW);
    if ended.err.contains("has too few cores") {
        // This host has a single core.
        assert_eq!(ended.code, Some(1));
        return;
    }
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let [said, seen] = cpus(&ended);
    assert_eq!(said, seen);
    assert!(numbers(&seen[0]).is_disjoint(&numbers(&seen[1])), "{seen:?}");
}

fn a_rank_without_a_gpu_is_an_error_before_anything_starts() {
    let launcher = Launcher::script(&["--numa-binding=node"], "echo started");
    let ended = launcher.env("CUDA_VISIBLE_DEVICES", "1000000").end();
    assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""));
    ended.says("cannot bind ranks to CPUs: CUDA_VISIBLE_DEVICES has \"1000000\"");
}
