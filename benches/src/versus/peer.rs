//! A program that measures on request, so that its samples can be interleaved with others. Most of them are in Python.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};

/// A peer that has not answered, or not ended, for so long hangs.
const LIMIT: Duration = Duration::from_secs(20 * 60);

/// An environment in which a process keeps the memory that it frees: glibc's setting that memory comes from the heap alone,
/// and the one that the heap is not trimmed. Without it, of two programs that do the same one may ask the system for its
/// memory anew in each step.
pub const KEEPS_MEMORY: [(&str, &str); 2] = [("MALLOC_MMAP_MAX_", "0"), ("MALLOC_TRIM_THRESHOLD_", "1000000000000")];

/// A running peer: one process, or several that handle each request together. Dropping it closes their standard input,
/// which ends them.
pub struct Peer {
    first: Process,
    others: Vec<Process>,
    version: String,
}

struct Process {
    /// For messages.
    name: String,
    child: Child,
    requests: Option<ChildStdin>,
    answers: Receiver<String>,
    limit: Duration,
}

impl Peer {
    /// Starts the Python program `source`. Its first line of output is its version, or `missing` and the reason.
    ///
    /// # Errors
    /// When Python cannot be run, or an import of the program fails.
    pub fn start(python: &Path, source: &str, args: &[String]) -> Result<Self> {
        Self::start_with(python, source, args, &[])
    }

    /// The same with more variables in its environment.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_with(
        python: &Path,
        source: &str,
        args: &[String],
        environment: &[(&'static str, String)],
    ) -> Result<Self> {
        let mut command = Command::new(python);
        // `LD_LIBRARY_PATH` names this program's libtorch; Python's torch finds its own.
        command.args(["-c", source]).args(args).env_remove("LD_LIBRARY_PATH");
        command.envs(environment.iter().cloned());
        Self::start_within(name_of(source), command, Vec::new(), LIMIT)
    }

    /// Starts processes that each get every request. Only the answers of the first one are used.
    ///
    /// # Errors
    /// When a process cannot be run or ends at once, or the first one reports that something is missing.
    pub fn start_together(first: Command, others: Vec<Command>) -> Result<Self> {
        Self::start_within(None, first, others, LIMIT)
    }

    fn start_within(name: Option<&str>, first: Command, others: Vec<Command>, limit: Duration) -> Result<Self> {
        let start = |command| Process::start(name, command, limit);
        let first = start(first)?;
        let others = others.into_iter().map(start).collect::<Result<_>>()?;
        let mut peer = Self { first, others, version: String::new() };
        peer.version = peer.answer().context("it could not start")?;
        match peer.version.strip_prefix("missing ") {
            Some(reason) => bail!("{reason}"),
            None => Ok(peer),
        }
    }

    /// The version that it reported.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The process ID of its first process.
    pub fn process(&self) -> u32 {
        self.first.child.id()
    }

    /// Asks for `count` steps of `name`, and returns what was measured, such as the seconds that they took.
    ///
    /// # Errors
    /// When the peer has ended, for example after an error, when it hangs, or its answer is not a number.
    pub fn measure(&mut self, name: &str, count: u32) -> Result<f64> {
        for process in self.all() {
            let requests = process.requests.as_mut().context("the peer has ended")?;
            writeln!(requests, "{name} {count}")?;
            requests.flush()?;
        }
        self.answer()?.parse().with_context(|| format!("the answer to {name} is not a number"))
    }

    /// The answer of the first process, once all have answered. A peer that hangs is killed.
    fn answer(&mut self) -> Result<String> {
        let until = Instant::now() + self.first.limit;
        let answer = self.first.answer(until).and_then(|first| {
            self.others.iter().try_for_each(|other| other.answer(until).map(drop))?;
            Ok(first)
        });
        let name = &self.first.name;
        let error = match answer {
            Ok(answer) => return Ok(answer),
            Err(RecvTimeoutError::Disconnected) => bail!("{name} has ended; its error is above"),
            Err(RecvTimeoutError::Timeout) => {
                let minutes = self.first.limit.as_secs() / 60;
                anyhow!("{name} has not answered for {minutes} minutes, and was killed")
            }
        };
        self.all().for_each(Process::kill);
        Err(error)
    }

    fn all(&mut self) -> impl Iterator<Item = &mut Process> {
        std::iter::once(&mut self.first).chain(&mut self.others)
    }
}

/// The first sentence of a Python program's text, which says whose side it is.
fn name_of(source: &str) -> Option<&str> {
    source.strip_prefix("\"\"\"")?.split(['.', '\n']).next()
}

impl Process {
    fn start(name: Option<&str>, mut command: Command, limit: Duration) -> Result<Self> {
        let program = command.get_program().display().to_string();
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot run {program}"))?;
        let (requests, output) = (child.stdin.take(), child.stdout.take().context("a peer has no standard output")?);
        let (sender, answers) = channel();
        // Reads until the process ends, so that waiting for an answer can have a limit.
        thread::spawn(move || {
            let lines = BufReader::new(output).lines().map_while(Result::ok);
            lines.map(|line| sender.send(line)).take_while(Result::is_ok).for_each(drop);
        });
        Ok(Self { name: name.map_or(program, str::to_owned), child, requests, answers, limit })
    }

    fn answer(&self, until: Instant) -> Result<String, RecvTimeoutError> {
        let line = self.answers.recv_timeout(until.saturating_duration_since(Instant::now()))?;
        Ok(line.trim().to_owned())
    }

    /// Nothing is left to do with its errors: it may have ended already.
    fn kill(&mut self) {
        drop(self.requests.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Close all inputs before waiting for any process, because the processes may wait for each other.
        self.all().for_each(|process| drop(process.requests.take()));
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.requests.take());
        // It ends at the end of its input; one that hangs is killed.
        let until = Instant::now() + self.limit;
        while self.is_running() && Instant::now() < until {
            thread::sleep(Duration::from_millis(10));
        }
        if self.is_running() {
            eprintln!("{} has not ended for {} minutes: killing it", self.name, self.limit.as_secs() / 60);
        }
        self.kill();
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    /// A peer that is a script, and is given two seconds.
    fn started(script: &str) -> Peer {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Peer::start_within(Some("a test"), command, Vec::new(), Duration::from_secs(2)).unwrap()
    }

    #[test]
    fn a_peer_that_ends_is_told_from_one_that_answers() {
        let mut peer = started("echo 1.0; read line; echo 2.5");
        assert_eq!(peer.measure("step", 3).unwrap(), 2.5);
        assert_eq!(peer.version(), "1.0");
        let error = peer.measure("step", 3).unwrap_err().to_string();
        assert!(error.contains("has ended") || error.contains("pipe"), "{error}");
    }

    #[test]
    fn a_peer_that_hangs_is_killed_and_named() {
        let mut peer = started("echo 1.0; read line; exec sleep 30");
        let error = peer.measure("step", 1).unwrap_err().to_string();
        assert!(error.starts_with("a test has not answered for"), "{error}");
        assert!(!peer.first.is_running());
        assert_eq!(peer.measure("step", 1).unwrap_err().to_string(), "the peer has ended");
    }

    #[test]
    fn a_peer_that_does_not_end_is_killed() {
        let folder = tempfile::tempdir().unwrap();
        let end = folder.path().join("end");
        drop(started(&format!("echo 1.0; sleep 20; touch '{}'", end.display())));
        assert!(!end.exists(), "it was waited for");
    }

    #[test]
    fn a_program_is_named_by_its_first_sentence() {
        assert_eq!(name_of("\"\"\"DALI's side of a part. Answers.\n\"\"\"\n"), Some("DALI's side of a part"));
        assert_eq!(name_of("import torch"), None);
    }
}
