//! Memory, threads and file descriptors of processes, from Linux's `/proc`.

use std::fs;

use anyhow::{Context, Result};

/// Resident memory, threads and open file descriptors of this process.
#[derive(Clone, Copy, Debug)]
pub struct Usage {
    pub mebibytes: f64,
    pub threads: f64,
    pub descriptors: f64,
}

impl Usage {
    pub fn now() -> Result<Self> {
        let status =
            fs::read_to_string("/proc/self/status").context("/proc/self/status is needed to measure memory")?;
        let number = |name: &str| field(&status, name).with_context(|| format!("/proc/self/status lacks {name}"));
        // Listing the folder opens one more.
        let descriptors = fs::read_dir("/proc/self/fd")?.count() - 1;
        Ok(Self { mebibytes: number("VmRSS")? / 1024.0, threads: number("Threads")?, descriptors: descriptors as f64 })
    }
}

/// The proportional set size (PSS) of this process without its children, in MiB: a page that processes share counts in
/// parts.
pub fn own_mebibytes() -> Result<f64> {
    pss_mebibytes(&[std::process::id()])
}

/// The proportional set size of a process and all its descendants, in MiB.
pub fn tree_mebibytes(process: u32) -> Result<f64> {
    let parents = parents();
    let mut tree = vec![process];
    let mut next = 0;
    while next < tree.len() {
        let parent = tree[next];
        tree.extend(parents.iter().filter(|(_, of)| *of == parent).map(|(child, _)| *child));
        next += 1;
    }
    pss_mebibytes(&tree)
}

fn pss_mebibytes(processes: &[u32]) -> Result<f64> {
    let mut kibibytes = 0.0;
    for process in processes {
        // A process that has ended since counts as 0.
        let rollup = fs::read_to_string(format!("/proc/{process}/smaps_rollup")).unwrap_or_default();
        kibibytes += field(&rollup, "Pss").unwrap_or(0.0);
    }
    anyhow::ensure!(kibibytes > 0.0, "the memory of {processes:?} cannot be measured");
    Ok(kibibytes / 1024.0)
}

/// Each process with its parent.
fn parents() -> Vec<(u32, u32)> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let parent = |process: u32| {
        let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
        Some((process, field(&status, "PPid")? as u32))
    };
    numbers.filter_map(parent).collect()
}

/// The number after `name:` in a file with lines such as `Name:   123 kB`.
fn field(text: &str, name: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_found_by_its_whole_name() {
        let text = "VmRSSX:\t1 kB\nVmRSS:\t  2048 kB\nThreads:\t3\n";
        assert_eq!(["VmRSS", "Threads", "Thread"].map(|name| field(text, name)), [Some(2048.0), Some(3.0), None]);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_process_and_its_child_have_memory() {
        let usage = Usage::now().unwrap();
        assert!(usage.mebibytes > 1.0 && usage.threads >= 1.0 && usage.descriptors >= 3.0, "{usage:?}");
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let (own, tree) = (own_mebibytes().unwrap(), tree_mebibytes(std::process::id()).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(0.0 < own && own < tree, "{own} of {tree}");
    }
}
