//! Finds processes through `/proc`, and ends them.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, wait};

use crate::error::RankEnd;

/// The variable that every process of a launch inherits, so that it can be found when its parents have died.
pub const MARK: &str = "OVERDRIVE_LAUNCH_ID";

/// How long a process may take to end after SIGKILL. It needs a CPU for that, and time to free its memory.
pub const DEATH_LIMIT: Duration = Duration::from_secs(30);

/// In bytes. Linux allows a quarter of the stack's limit, which is 8 MiB unless set.
const LARGEST_ENVIRONMENT: usize = 2 << 20;

/// How often a process may be seen with arguments but without variables before it counts as one without variables.
const MOST_LOOKS: usize = 20;

/// Reaps the processes that have ended since the last call, adopted orphans included.
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

/// Kills and reaps all descendants of this process, including any started meanwhile. This process has to be a child
/// subreaper, so that orphans become its children. Returns the processes still alive after [`DEATH_LIMIT`].
pub fn end_descendants() -> Vec<Pid> {
    end_all(|| {
        reap();
        // Without children there are no descendants, so there is no need to scan `/proc`.
        if wait(WaitOptions::NOHANG).is_err_and(|error| error == Errno::CHILD) {
            return Vec::new();
        }
        descendants(getpid())
    })
}

/// Kills every process that carries the mark of a launch.
pub fn end_marked(mark: &str) -> Vec<Pid> {
    end_all(|| marked(mark))
}

fn end_all(living: impl Fn() -> Vec<Pid>) -> Vec<Pid> {
    let start = Instant::now();
    let mut pause = Duration::from_micros(200);
    loop {
        let left = living();
        for pid in &left {
            // It may have ended already.
            let _ = kill_process(*pid, Signal::KILL);
        }
        if left.is_empty() || start.elapsed() > DEATH_LIMIT {
            return left;
        }
        sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

/// The living descendants of this process that are in one of the process groups. A group can outlive its leader, and
/// its number may then be reused by an unrelated process, which is no descendant.
pub fn members(groups: &[Pid]) -> Vec<Pid> {
    let group_of = |pid: &Pid| Some(stat(pid.as_raw_pid())?.group);
    let is_meant = |group: i32| groups.iter().any(|it| it.as_raw_pid() == group);
    descendants(getpid()).into_iter().filter(|pid| group_of(pid).is_some_and(is_meant)).collect()
}

/// The living descendants of `root`.
fn descendants(root: Pid) -> Vec<Pid> {
    let mut children: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
    for pid in pids() {
        // A zombie's children already have another parent.
        if let Some(stat) = stat(pid).filter(|it| it.state != 'Z' && it.state != 'X') {
            children.entry(stat.parent).or_default().push(pid);
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

/// The processes, except this one, that were started with the mark in their environment.
fn marked(mark: &str) -> Vec<Pid> {
    let entry = format!("{MARK}={mark}");
    let own = getpid().as_raw_pid();
    pids().filter(|pid| *pid != own && carries(*pid, &entry)).filter_map(Pid::from_raw).collect()
}

/// By a single read: a process that replaces its program between two reads leaves the second one empty.
fn environment_of(pid: i32) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; LARGEST_ENVIRONMENT];
    let read = File::open(format!("/proc/{pid}/environ"))?.read(&mut bytes)?;
    bytes.truncate(read);
    Ok(bytes)
}

/// Whether a process was started with a variable, given as `NAME=value`.
fn carries(pid: i32, entry: &str) -> bool {
    let file = |name: &str| fs::read(format!("/proc/{pid}/{name}"));
    let start = Instant::now();
    let mut empty = 0;
    loop {
        let Ok(environment) = environment_of(pid) else { return false };
        if !environment.is_empty() {
            return environment.split(|byte| *byte == 0).any(|variable| variable == entry.as_bytes());
        }
        // While a process replaces its program (`exec`), it has memory, but neither variables nor arguments for a
        // moment. Processes that have ended, and those of the kernel, have no memory.
        let has_memory = file("statm").is_ok_and(|text| !text.starts_with(b"0 "));
        let has_arguments = file("cmdline").is_ok_and(|arguments| !arguments.is_empty());
        // The moment may have passed since the variables were read, so that once tells nothing.
        empty += usize::from(has_arguments);
        if !has_memory || empty > MOST_LOOKS || start.elapsed() > DEATH_LIMIT / 3 {
            return false;
        }
        sleep(Duration::from_micros(50));
    }
}

fn pids() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

#[derive(Debug, PartialEq)]
struct Stat {
    state: char,
    parent: i32,
    group: i32,
}

fn stat(pid: i32) -> Option<Stat> {
    let bytes = fs::read(format!("/proc/{pid}/stat")).ok()?;
    parse_stat(&String::from_utf8_lossy(&bytes))
}

/// The process name, in parentheses, may contain parentheses itself.
fn parse_stat(text: &str) -> Option<Stat> {
    let (_, fields) = text.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    Some(Stat { state, parent: fields.next()?.parse().ok()?, group: fields.next()?.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_may_have_any_name() {
        let stat = Stat { state: 'S', parent: 42, group: 5 };
        assert_eq!(parse_stat("7 (a) Z 1) S 42 5 7 0"), Some(stat));
        assert_eq!(parse_stat("7 (a"), None);
    }

    #[test]
    fn a_process_that_is_replacing_its_program_is_found() {
        const AGAIN: &str = "exec sh -c \"$AGAIN\"";
        let mut command = std::process::Command::new("sh");
        let mut child = command.args(["-c", AGAIN]).env("AGAIN", AGAIN).env("MARKED", "yes").spawn().unwrap();
        let missed = (0..20_000).filter(|_| !carries(Pid::from_child(&child).as_raw_pid(), "MARKED=yes")).count();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(missed, 0);
    }
}
