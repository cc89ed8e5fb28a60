//! Finding processes through `/proc`, and ending them.

use std::collections::BTreeMap;
use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, wait};

use crate::error::RankEnd;

/// The variable that every process of a launch inherits. What lost its parents is found by it.
pub const MARK: &str = "OVERDRIVE_LAUNCH_ID";

/// How long a process may take to go after SIGKILL.
pub const DEATH_LIMIT: Duration = Duration::from_secs(10);

/// Processes that ended since the last call, strangers that this process adopted among them.
pub fn reap() -> Vec<(Pid, RankEnd)> {
    let mut ended = Vec::new();
    while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
        if let Some(code) = status.exit_status() {
            ended.push((pid, RankEnd::Code(code)));
        } else if let Some(signal) = status.terminating_signal() {
            ended.push((pid, RankEnd::Signal(signal)));
        }
    }
    ended
}

/// Ends every descendant of this process, however deep, and reaps them; what is started meanwhile too. This process has
/// to be the one that orphans among them fall to. Returns those that were still there after [`DEATH_LIMIT`].
pub fn end_descendants() -> Vec<Pid> {
    end_all(|| {
        reap();
        descendants(getpid())
    })
}

/// Ends every process that carries the mark of a launch.
pub fn end_marked(mark: &str) -> Vec<Pid> {
    end_all(|| marked(mark))
}

fn end_all(living: impl Fn() -> Vec<Pid>) -> Vec<Pid> {
    let start = Instant::now();
    let mut pause = Duration::from_micros(200);
    loop {
        let left = living();
        if left.is_empty() || start.elapsed() > DEATH_LIMIT {
            return left;
        }
        for pid in left {
            // Gone already, as likely as not.
            let _ = kill_process(pid, Signal::KILL);
        }
        sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

/// The living processes below `root`.
fn descendants(root: Pid) -> Vec<Pid> {
    let mut children: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
    for pid in pids() {
        if let Some((parent, state)) = stat(pid) {
            // A zombie's children fell to another process already.
            if state != 'Z' && state != 'X' {
                children.entry(parent).or_default().push(pid);
            }
        }
    }
    let mut found = Vec::new();
    let mut open = vec![root.as_raw_pid()];
    while let Some(pid) = open.pop() {
        for child in children.remove(&pid).unwrap_or_default() {
            found.extend(Pid::from_raw(child));
            open.push(child);
        }
    }
    found
}

/// The living processes whose environment, as they were started, holds the mark; this one never counts.
fn marked(mark: &str) -> Vec<Pid> {
    let entry = format!("{MARK}={mark}");
    let own = getpid().as_raw_pid();
    let holds = |pid: &i32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|variable| variable == entry.as_bytes())
    };
    pids().filter(|pid| *pid != own).filter(holds).filter_map(Pid::from_raw).collect()
}

fn pids() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// A process's parent and state.
fn stat(pid: i32) -> Option<(i32, char)> {
    let bytes = fs::read(format!("/proc/{pid}/stat")).ok()?;
    parse_stat(&String::from_utf8_lossy(&bytes))
}

/// The name in parentheses may hold anything, parentheses too.
fn parse_stat(text: &str) -> Option<(i32, char)> {
    let (_, fields) = text.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((fields.next()?.parse().ok()?, state))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_may_have_any_name() {
        assert_eq!(parse_stat("7 (a) Z 1) S 42 7 7 0"), Some((42, 'S')));
        assert_eq!(parse_stat("7 (a"), None);
    }
}
