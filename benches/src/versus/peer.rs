//! A Python program that measures on request, so that its samples can be taken in turns with ours.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

/// A running peer. It ends when this is dropped, because its standard input does.
pub struct Peer {
    child: Child,
    requests: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    version: String,
}

impl Peer {
    /// Starts `source` under `python`; the first line that it says is its version, or `missing` and what it lacks.
    ///
    /// # Errors
    /// When Python or what the program imports is missing.
    pub fn start(python: &Path, source: &str, args: &[String]) -> Result<Self> {
        let mut child = Command::new(python)
            .args(["-c", source])
            .args(args)
            // Ours is on the loader path for this program; Python finds its own.
            .env_remove("LD_LIBRARY_PATH")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot run {}", python.display()))?;
        let requests = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().context("a peer has no standard output")?);
        let mut peer = Self { child, requests, answers, version: String::new() };
        peer.version = peer.answer().with_context(|| format!("{} could not start; see above", python.display()))?;
        match peer.version.strip_prefix("missing ") {
            Some(reason) => bail!("{reason}"),
            None => Ok(peer),
        }
    }

    /// What it said of itself.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The number of its process.
    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// Seconds that it took for `count` steps of `name`.
    ///
    /// # Errors
    /// When it has ended, or does not know the name.
    pub fn seconds(&mut self, name: &str, count: u32) -> Result<f64> {
        let requests = self.requests.as_mut().context("the peer has ended")?;
        writeln!(requests, "{name} {count}")?;
        requests.flush()?;
        self.answer()?.parse().with_context(|| format!("{name}: not a time"))
    }

    fn answer(&mut self) -> Result<String> {
        let mut line = String::new();
        ensure!(self.answers.read_line(&mut line)? > 0, "the peer has ended");
        Ok(line.trim().to_owned())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.requests.take());
        // It ends by itself at the end of its input; nobody is left to tell if it does not.
        let _ = self.child.wait();
    }
}
