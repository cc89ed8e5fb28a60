//! What processes hold, as Linux tells it.

use std::fs;

use anyhow::{Context, Result};

/// Resident memory, threads and open descriptors of this process.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    pub mebibytes: f64,
    pub threads: f64,
    pub descriptors: f64,
}

impl Held {
    pub fn now() -> Result<Self> {
        let status =
            fs::read_to_string("/proc/self/status").context("/proc/self/status is needed to measure memory")?;
        let number = |name: &str| field(&status, name).with_context(|| format!("/proc/self/status lacks {name}"));
        // The folder that lists them is open meanwhile.
        let descriptors = fs::read_dir("/proc/self/fd")?.count() - 1;
        Ok(Self { mebibytes: number("VmRSS")? / 1024.0, threads: number("Threads")?, descriptors: descriptors as f64 })
    }
}

/// The memory of this process in MiB, without what it started; pages that several processes share count in parts.
pub fn own_mebibytes() -> Result<f64> {
    proportional_mebibytes(&[std::process::id()])
}

/// The same of another process and of all that it started.
pub fn tree_mebibytes(process: u32) -> Result<f64> {
    let parents = parents();
    let mut tree = vec![process];
    let mut next = 0;
    while next < tree.len() {
        let parent = tree[next];
        tree.extend(parents.iter().filter(|(_, of)| *of == parent).map(|(child, _)| *child));
        next += 1;
    }
    proportional_mebibytes(&tree)
}

fn proportional_mebibytes(processes: &[u32]) -> Result<f64> {
    let mut kibibytes = 0.0;
    for process in processes {
        // A process may have ended since.
        let rollup = fs::read_to_string(format!("/proc/{process}/smaps_rollup")).unwrap_or_default();
        kibibytes += field(&rollup, "Pss").unwrap_or(0.0);
    }
    anyhow::ensure!(kibibytes > 0.0, "the memory of {processes:?} cannot be measured");
    Ok(kibibytes / 1024.0)
}

/// Every process with its parent.
fn parents() -> Vec<(u32, u32)> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let parent = |process: u32| {
        let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
        Some((process, field(&status, "PPid")? as u32))
    };
    numbers.filter_map(parent).collect()
}

/// The number behind `name:` in a file of lines `Name:   123 kB`.
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
    fn this_process_holds_something() {
        let held = Held::now().unwrap();
        assert!(held.mebibytes > 1.0 && held.threads >= 1.0 && held.descriptors >= 3.0, "{held:?}");
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let (own, tree) = (own_mebibytes().unwrap(), tree_mebibytes(std::process::id()).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(0.0 < own && own < tree, "{own} of {tree}");
    }
}
