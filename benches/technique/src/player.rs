//! The benchmark's handle on a contender's process.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use overdrive_bench_report::{Contender, Measured};

use super::job::{Ask, Job, Said};
use super::watch::Watch;

/// The argument that makes this program a contender; the job follows as JSON.
pub const JOB_ARGUMENT: &str = "--job";
/// How often a disturbed timing is repeated.
const MOST_REPETITIONS: usize = 2;

/// A running contender, and what was measured of it.
pub struct Player {
    child: Child,
    asks: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    pub measured: Measured,
    /// Its techniques.
    pub parts: Vec<Contender>,
    /// The options that tuned Python has chosen.
    pub options: serde_json::Value,
}

/// A contender that may not have opened its data yet.
pub struct Starting(Started);

impl Starting {
    /// Waits until it is ready. A Python contender that fails is `Missing`.
    ///
    /// # Errors
    /// When one of ours fails.
    pub fn wait(self) -> Result<Started> {
        let mut player = match self.0 {
            Started::Player(player) => player,
            missing => return Ok(missing),
        };
        let is_python = player.measured.contender.is_python();
        match player.answer() {
            Ok(Said::Ready { choices, parts, options }) => {
                player.measured.choices = choices;
                (player.parts, player.options) = (parts, options);
            }
            Ok(Said::Missing(reason)) => return Ok(Started::Missing(reason)),
            Ok(other) => bail!("{}: unexpected first answer {other:?}", player.measured.contender),
            Err(error) if is_python => return Ok(Started::Missing(format!("{error:#}"))),
            Err(error) => return Err(error),
        }
        Ok(Started::Player(player))
    }
}

/// A running contender, or why it cannot run.
pub enum Started {
    Player(Box<Player>),
    Missing(String),
}

impl Player {
    /// Starts a contender: this program again, or a Python program in `peers`.
    ///
    /// # Errors
    /// When this program cannot be started again.
    pub fn start(job: &Job, python: &Path, peers: &Path) -> Result<Starting> {
        let argument = serde_json::to_string(job)?;
        let mut command = if job.contender.is_python() {
            let mut command = Command::new(python);
            // The path leads to the libtorch of this program; Python's torch finds its own.
            command.arg(peers.join(format!("{}.py", job.workload))).arg(argument).env_remove("LD_LIBRARY_PATH");
            command
        } else {
            let mut command = Command::new(std::env::current_exe().context("where is this program?")?);
            command.arg(JOB_ARGUMENT).arg(argument);
            command
        };
        // Without a GPU, libtorch and its profiler print warnings that the user can do nothing about.
        command.env("KINETO_LOG_LEVEL", "99").env("TORCH_CPP_LOG_LEVEL", "ERROR");
        let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = match spawned {
            Err(error) if job.contender.is_python() => {
                let reason = format!("{} cannot be run: {error}", python.display());
                return Ok(Starting(Started::Missing(reason)));
            }
            spawned => spawned.context("cannot start a contender")?,
        };
        let (asks, stdout) = (child.stdin.take(), child.stdout.take().context("no standard output")?);
        let measured = Measured {
            contender: job.contender,
            choices: Vec::new(),
            turns: Vec::new(),
            wholes: Vec::new(),
            peak_bytes: None,
            peak_device_bytes: None,
            timeline: Vec::new(),
        };
        let answers = BufReader::new(stdout);
        let player = Self { child, asks, answers, measured, parts: Vec::new(), options: serde_json::Value::Null };
        Ok(Starting(Started::Player(Box::new(player))))
    }

    /// Takes a turn; a disturbed one is repeated.
    ///
    /// # Errors
    /// When the process has ended.
    pub fn turn(&mut self) -> Result<()> {
        let turn = self.undisturbed(Ask::Turn, |said, disturbance| match said {
            Said::Turn(turn) => Some(overdrive_bench_report::Turn { disturbance, ..turn }),
            _ => None,
        })?;
        self.measured.turns.push(turn);
        Ok(())
    }

    /// Trains from start to end; a disturbed training is repeated.
    ///
    /// # Errors
    /// When the process has ended.
    pub fn whole(&mut self, seed: u32) -> Result<()> {
        let whole = self.undisturbed(Ask::Whole(seed), |said, disturbance| match said {
            Said::Whole(whole) => Some(overdrive_bench_report::Whole { disturbance, ..whole }),
            _ => None,
        })?;
        self.measured.wholes.push(whole);
        Ok(())
    }

    /// Records a few steps, and returns what the diagnosis says.
    ///
    /// # Errors
    /// When the process has ended.
    pub fn steps(&mut self) -> Result<Vec<String>> {
        self.ask(Ask::Steps)?;
        let Said::Steps { timeline, next } = self.answer()? else {
            bail!("{}: unexpected answer", self.measured.contender)
        };
        self.measured.timeline = timeline;
        Ok(next)
    }

    /// Ends the process and returns what was measured.
    ///
    /// # Errors
    /// When the process fails.
    pub fn end(mut self) -> Result<Measured> {
        drop(self.asks.take());
        if let Said::End { peak_device_bytes } = self.answer()? {
            self.measured.peak_device_bytes = peak_device_bytes;
        }
        let status = self.child.wait()?;
        ensure!(status.success(), "{} ended with {status}", self.measured.contender);
        Ok(self.measured.clone())
    }

    fn undisturbed<T>(
        &mut self,
        ask: Ask,
        read: impl Fn(Said, overdrive_bench_report::Disturbance) -> Option<T>,
    ) -> Result<T> {
        let mut repetitions = 0;
        loop {
            let watch = Watch::start(self.child.id());
            self.ask(ask)?;
            let said = self.answer()?;
            let (disturbance, memory) = watch.stop();
            self.measured.peak_bytes = self.measured.peak_bytes.max(memory);
            if disturbance.is_too_much() && repetitions < MOST_REPETITIONS {
                repetitions += 1;
                continue;
            }
            return read(said, disturbance).with_context(|| format!("{}: unexpected answer", self.measured.contender));
        }
    }

    fn ask(&mut self, ask: Ask) -> Result<()> {
        let asks = self.asks.as_mut().context("the process has ended")?;
        writeln!(asks, "{}", serde_json::to_string(&ask)?)?;
        Ok(asks.flush()?)
    }

    fn answer(&mut self) -> Result<Said> {
        let contender: Contender = self.measured.contender;
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            let status = self.child.wait()?;
            bail!("{contender} has ended ({status}); its message is above");
        }
        serde_json::from_str(&line).with_context(|| format!("{contender}: unexpected answer: {}", line.trim()))
    }
}

impl Drop for Player {
    fn drop(&mut self) {
        // The process normally ends with its input; one that hangs is killed.
        drop(self.asks.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
