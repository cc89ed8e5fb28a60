//! A program that measures on request, so that its samples can be interleaved with others. Most of them are in Python.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

/// A running peer: one process, or several that handle each request together. Dropping it closes their standard input,
/// which ends them.
pub struct Peer {
    first: Process,
    others: Vec<Process>,
    version: String,
}

struct Process {
    child: Child,
    requests: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts the Python program `source`. Its first line of output is its version, or `missing` and the reason.
    ///
    /// # Errors
    /// When Python cannot be run, or an import of the program fails.
    pub fn start(python: &Path, source: &str, args: &[String]) -> Result<Self> {
        let mut command = Command::new(python);
        // `LD_LIBRARY_PATH` names this program's libtorch; Python's torch finds its own.
        command.args(["-c", source]).args(args).env_remove("LD_LIBRARY_PATH");
        Self::start_together(command, Vec::new())
    }

    /// Starts processes that each get every request. Only the answers of the first one are used.
    ///
    /// # Errors
    /// When a process cannot be run or ends at once, or the first one reports that something is missing.
    pub fn start_together(first: Command, others: Vec<Command>) -> Result<Self> {
        let first = Process::start(first)?;
        let others = others.into_iter().map(Process::start).collect::<Result<_>>()?;
        let mut peer = Self { first, others, version: String::new() };
        peer.version = peer.answer().context("it could not start; its error is above")?;
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
    /// When the peer has ended, for example after an error, or its answer is not a number.
    pub fn measure(&mut self, name: &str, count: u32) -> Result<f64> {
        for process in self.all() {
            let requests = process.requests.as_mut().context("the peer has ended")?;
            writeln!(requests, "{name} {count}")?;
            requests.flush()?;
        }
        self.answer()?.parse().with_context(|| format!("the answer to {name} is not a number"))
    }

    fn answer(&mut self) -> Result<String> {
        let first = self.first.answer()?;
        self.others.iter_mut().try_for_each(|other| other.answer().map(drop))?;
        Ok(first)
    }

    fn all(&mut self) -> impl Iterator<Item = &mut Process> {
        std::iter::once(&mut self.first).chain(&mut self.others)
    }
}

impl Process {
    fn start(mut command: Command) -> Result<Self> {
        let program = command.get_program().to_owned();
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot run {}", program.display()))?;
        let requests = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().context("a peer has no standard output")?);
        Ok(Self { child, requests, answers })
    }

    fn answer(&mut self) -> Result<String> {
        let mut line = String::new();
        ensure!(self.answers.read_line(&mut line)? > 0, "the peer has ended");
        Ok(line.trim().to_owned())
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
        // It ends at the end of its input. There is no caller left who could handle an error.
        let _ = self.child.wait();
    }
}
