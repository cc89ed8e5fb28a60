//! A contender's process, from the benchmark's side.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use overdrive_bench_report::{Contender, Measured};

use super::job::{Ask, Job, Said};
use super::watch::Watch;

/// The argument that makes this program a contender; the job follows as JSON.
pub const JOB_ARGUMENT: &str = "--job";
/// How often a time is taken again while something else uses the machine.
const MOST_REPETITIONS: usize = 2;

/// A running contender, and what was measured of it.
pub struct Player {
    child: Child,
    asks: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    pub measured: Measured,
    /// What it changes of plain tch.
    pub parts: Vec<Contender>,
    /// What Python's has chosen, in its own form.
    pub options: serde_json::Value,
}

/// A contender that has been started.
pub struct Starting(Started);

impl Starting {
    /// Waits until it has its data.
    ///
    /// # Errors
    /// When ours ends before that.
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
            Ok(other) => bail!("{} said {other:?} first", player.measured.contender),
            Err(error) if is_python => return Ok(Started::Missing(format!("{error:#}"))),
            Err(error) => return Err(error),
        }
        Ok(Started::Player(player))
    }
}

/// A contender that is there, or why it is not.
pub enum Started {
    Player(Box<Player>),
    Missing(String),
}

impl Player {
    /// Starts a contender: Python's by a program in `peers`.
    ///
    /// # Errors
    /// When ours cannot be started. What Python lacks is no error.
    pub fn start(job: &Job, python: &Path, peers: &Path) -> Result<Starting> {
        let argument = serde_json::to_string(job)?;
        let mut command = if job.contender.is_python() {
            let mut command = Command::new(python);
            // Ours is on the loader path for this program; Python finds its own.
            command.arg(peers.join(format!("{}.py", job.workload))).arg(argument).env_remove("LD_LIBRARY_PATH");
            command
        } else {
            let mut command = Command::new(std::env::current_exe().context("where is this program?")?);
            command.arg(JOB_ARGUMENT).arg(argument);
            command
        };
        // What libtorch and its profiler remark on a machine without a GPU is nothing a reader can act on.
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

    /// Takes a turn, again where it was disturbed.
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

    /// Trains as a whole, again where that was disturbed.
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

    /// What a few steps consist of, and what would help.
    ///
    /// # Errors
    /// When the process has ended.
    pub fn steps(&mut self) -> Result<Vec<String>> {
        self.ask(Ask::Steps)?;
        let Said::Steps { timeline, next } = self.answer()? else { bail!("it said something else") };
        self.measured.timeline = timeline;
        Ok(next)
    }

    /// Ends it.
    ///
    /// # Errors
    /// When it fails at its end.
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
            return read(said, disturbance).context("it said something else");
        }
    }

    fn ask(&mut self, ask: Ask) -> Result<()> {
        let asks = self.asks.as_mut().context("it has ended")?;
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
        serde_json::from_str(&line).with_context(|| format!("{contender} said something unexpected: {}", line.trim()))
    }
}

impl Drop for Player {
    fn drop(&mut self) {
        // It ends at the end of its input; what hangs is killed.
        drop(self.asks.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
