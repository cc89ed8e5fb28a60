//! Finds processes through `/proc`, and ends them.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, wait};

use crate::error::RankEnd;

/// The variable that every process of a launch inherits, so that it can be found when its parents have died.
pub const MARK: &str = "OVERDRIVE_LAUNCH_ID";

/// How long a process may take to end after SIGKILL. It needs a CPU for that, and time to free its memory.
pub const DEATH_LIMIT: Duration = Duration::from_secs(30);

/// In bytes: the most that Linux allows for arguments and variables, whatever the limit on the stack.
const LARGEST_ENVIRONMENT: usize = 6 << 20;

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
        // The children of an ended process already have another parent.
        if let Some(stat) = stat(pid).filter(|it| !it.has_ended()) {
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
fn read_environment(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; LARGEST_ENVIRONMENT];
    let read = File::open(path)?.read(&mut bytes)?;
    bytes.truncate(read);
    Ok(bytes)
}

/// The variables of a process, from its first thread, or if that has ended from the others. Empty if there are none, or
/// if it is replacing its program.
fn environment_of(pid: i32, stat: &Stat) -> io::Result<Vec<u8>> {
    if stat.state != 'Z' {
        return read_environment(&PathBuf::from(format!("/proc/{pid}/environ")));
    }
    let threads = fs::read_dir(format!("/proc/{pid}/task"))?.flatten();
    let mut all = threads.filter_map(|thread| read_environment(&thread.path().join("environ")).ok());
    Ok(all.find(|environment| !environment.is_empty()).unwrap_or_default())
}

/// Whether a process was started with a variable, given as `NAME=value`.
fn carries(pid: i32, entry: &str) -> bool {
    let start = Instant::now();
    loop {
        let Some(before) = stat(pid).filter(|it| !it.has_ended()) else { return false };
        match environment_of(pid, &before) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return false,
            Ok(environment) if !environment.is_empty() => {
                return environment.split(|byte| *byte == 0).any(|variable| variable == entry.as_bytes());
            }
            // Linux says that a process has ended, or is one of its own, by an error or by no variables.
            _ => {}
        }
        // While a process replaces its program (`exec`), it has memory, but neither variables nor code yet. It may have
        // got them since the variables were read.
        let again = stat(pid).is_some_and(|it| it.memory > 0 && (it.code_end == 0 || !it.variables.is_empty()));
        if !again || start.elapsed() > DEATH_LIMIT / 3 {
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
    threads: usize,
    /// In bytes. Processes that have ended, and those of the kernel, have none.
    memory: u64,
    /// The address where its code ends. Linux sets it last when it starts a program.
    code_end: u64,
    /// The addresses of the variables that it was started with.
    variables: Range<u64>,
}

impl Stat {
    /// The first thread of a process may end before the others, and stays a zombie until then.
    fn has_ended(&self) -> bool {
        self.state == 'X' || self.state == 'Z' && self.threads < 2
    }
}

fn stat(pid: i32) -> Option<Stat> {
    let bytes = fs::read(format!("/proc/{pid}/stat")).ok()?;
    parse_stat(&String::from_utf8_lossy(&bytes))
}

/// The process name, in parentheses, may contain parentheses itself.
fn parse_stat(text: &str) -> Option<Stat> {
    let (_, fields) = text.rsplit_once(')')?;
    let fields: Vec<&str> = fields.split_ascii_whitespace().collect();
    // By the numbers of the manual page proc_pid_stat(5), where the state is the third.
    let field = |number: usize| fields.get(number - 3).copied();
    let number = |place: usize| field(place)?.parse::<u64>().ok();
    Some(Stat {
        state: field(3)?.chars().next()?,
        parent: field(4)?.parse().ok()?,
        group: field(5)?.parse().ok()?,
        threads: field(20)?.parse().ok()?,
        memory: number(23)?,
        code_end: number(27)?,
        variables: number(50)?..number(51)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_may_have_any_name() {
        let stat = Stat { state: 'S', parent: 42, group: 5, threads: 20, memory: 23, code_end: 27, variables: 50..51 };
        let rest = (6..=52).map(|field| field.to_string()).collect::<Vec<_>>().join(" ");
        assert_eq!(parse_stat(&format!("7 (a) Z 1) S 42 5 {rest}")), Some(stat));
        assert_eq!(parse_stat("7 (a"), None);
    }

    /// A process with a variable that runs until it is dropped.
    struct Marked(std::process::Child);

    impl Marked {
        fn start(program: &str, args: &[&str]) -> Self {
            Self(std::process::Command::new(program).args(args).env("MARKED", "yes").spawn().unwrap())
        }

        fn pid(&self) -> i32 {
            Pid::from_child(&self.0).as_raw_pid()
        }

        fn is_found(&self) -> bool {
            carries(self.pid(), "MARKED=yes")
        }

        fn wait_until(&self, is_ready: impl Fn(&Stat) -> bool) {
            let start = Instant::now();
            while !is_ready(&stat(self.pid()).unwrap()) {
                assert!(start.elapsed() < Duration::from_secs(600), "{:?}", stat(self.pid()));
                sleep(Duration::from_millis(1));
            }
        }
    }

    impl Drop for Marked {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    #[test]
    fn a_process_that_is_replacing_its_program_is_found() {
        // The shell goes on in the same process.
        const AGAIN: &str = "export AGAIN=\"$0\"; exec sh -c \"$AGAIN\" \"$AGAIN\"";
        let process = Marked::start("sh", &["-c", AGAIN, AGAIN]);
        let missed: Vec<usize> = (0..20_000).filter(|_| !process.is_found()).collect();
        assert_eq!(missed, [0; 0]);
    }

    #[test]
    fn all_of_the_largest_environment_is_read() {
        // Beyond the 2 MiB that the usual limit on the stack allows.
        let large = "for number in $(seq 25); do printf 'V%d=%0100000d ' $number 0; done";
        let script = format!("ulimit -s 65536 && exec env -i PATH=\"$PATH\" $({large}) MARKED=yes sleep 1000");
        let process = Marked::start("sh", &["-c", &script]);
        process.wait_until(|stat| stat.variables.end - stat.variables.start > 2_500_000);
        assert!(process.is_found());
        let without = Marked::start("env", &["-i", "/bin/sleep", "1000"]);
        without.wait_until(|stat| stat.code_end > 0 && stat.variables.is_empty());
        assert!(!without.is_found());
    }

    #[test]
    fn a_process_whose_first_thread_has_ended_is_found() {
        const PROGRAM: &str = "import ctypes, threading, time\n\
                               threading.Thread(target=time.sleep, args=(1000,)).start()\n\
                               ctypes.CDLL(None).pthread_exit(None)";
        let has_python = std::process::Command::new("python3").args(["-c", "import ctypes"]).status();
        if !has_python.is_ok_and(|status| status.success()) {
            return println!("skipped: no Python");
        }
        let process = Marked::start("python3", &["-c", PROGRAM]);
        process.wait_until(|stat| stat.state == 'Z');
        assert!(process.is_found());
        assert!(descendants(getpid()).contains(&Pid::from_child(&process.0)));
    }
}
