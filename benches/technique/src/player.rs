//! The benchmark's handle on a contender's process.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use overdrive_bench_report::{Contender, Disturbance, Measured, Turn, Versions, Whole};

use super::job::{Ask, Job, Said};
use super::watch::Watch;

/// The argument that makes this program a contender; the job follows as JSON.
pub const JOB_ARGUMENT: &str = "--job";
/// How often a disturbed timing, or a disturbed choice of options, is repeated.
pub const MOST_REPETITIONS: usize = 2;
/// In a first look, all turns of a contender together are repeated so often: it is to end soon on a busy machine too.
const FIRST_LOOK_REPETITIONS: usize = 1;
/// A contender that has not answered for so long hangs.
const TIMEOUT: Duration = Duration::from_secs(20 * 60);
/// Up to a mark of a whole training it may take longer.
const WHOLE_TIMEOUT: Duration = Duration::from_secs(3 * 60 * 60);
/// A process ends soon after its last answer.
const EXIT_TIMEOUT: Duration = Duration::from_secs(60);

/// A running contender, and what was measured of it.
pub struct Player {
    child: Child,
    asks: Option<ChildStdin>,
    answers: Receiver<String>,
    pub measured: Measured,
    /// Its techniques.
    pub parts: Vec<Contender>,
    /// The techniques that it has tried and left out.
    pub left_out: Vec<Contender>,
    /// The options that tuned Python has chosen.
    pub options: serde_json::Value,
    /// Its software.
    pub versions: Versions,
    repetitions: Repetitions,
    /// Of the whole training that has begun: seconds up to each mark, and what else used the machine.
    parts_of_whole: Vec<(f64, Disturbance)>,
}

/// A contender that may not have opened its data yet.
pub struct Starting(Started);

impl Starting {
    /// The process, if one could be started.
    pub fn process(&self) -> Option<u32> {
        match &self.0 {
            Started::Player(player) => Some(player.child.id()),
            Started::Missing(..) => None,
        }
    }

    /// Waits until it is ready. One that fails is `Missing`.
    ///
    /// # Errors
    /// When it answers with nonsense.
    pub fn wait(self) -> Result<Started> {
        let mut player = match self.0 {
            Started::Player(player) => player,
            missing => return Ok(missing),
        };
        let contender = player.measured.contender;
        match player.answer(TIMEOUT) {
            Ok(Said::Ready { choices, parts, left_out, options, versions }) => {
                player.measured.choices = choices;
                (player.parts, player.left_out, player.options) = (parts, left_out, options);
                player.versions = versions;
            }
            Ok(Said::Missing(reason)) => return Ok(Started::Missing(contender, reason)),
            Ok(other) => bail!("{contender}: unexpected first answer {other:?}"),
            Err(error) => return Ok(Started::Missing(contender, format!("{error:#}"))),
        }
        Ok(Started::Player(player))
    }
}

/// A running contender, or why it cannot run.
pub enum Started {
    Player(Box<Player>),
    Missing(Contender, String),
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
        // libtorch's default is a thread for each core, even where a container may use fewer of them.
        command.env("OMP_NUM_THREADS", job.threads.to_string()).env_remove("MKL_NUM_THREADS");
        // Without a GPU, libtorch and its profiler print warnings that the user can do nothing about.
        command.env("KINETO_LOG_LEVEL", "99").env("TORCH_CPP_LOG_LEVEL", "ERROR");
        let mut child = match spawn(&mut command, job.contender) {
            Err(error) if job.contender.is_python() => {
                return Ok(Starting(Started::Missing(job.contender, format!("{error:#}"))));
            }
            spawned => spawned?,
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
            failure: None,
        };
        let (sender, answers) = channel();
        // Reads until the process ends, so that waiting for an answer can have a limit.
        thread::spawn(move || {
            let lines = BufReader::new(stdout).lines().map_while(Result::ok);
            lines.map(|line| sender.send(line)).take_while(Result::is_ok).for_each(drop);
        });
        let (parts, left_out, options) = (Vec::new(), Vec::new(), serde_json::Value::Null);
        let (versions, parts_of_whole) = (Versions::new(), Vec::new());
        let repetitions = Repetitions::new(!job.tries);
        let player =
            Self { child, asks, answers, measured, parts, left_out, options, versions, repetitions, parts_of_whole };
        Ok(Starting(Started::Player(Box::new(player))))
    }

    /// Makes the first steps, which are slow and not timed.
    ///
    /// # Errors
    /// When the process has ended.
    pub fn warm(&mut self) -> Result<()> {
        self.ask(Ask::Warm)?;
        match self.answer(TIMEOUT)? {
            Said::Warm => Ok(()),
            other => bail!("{}: unexpected answer {other:?}", self.measured.contender),
        }
    }

    /// Takes a turn; a disturbed one is repeated.
    ///
    /// # Errors
    /// When the process has ended.
    pub fn turn(&mut self) -> Result<()> {
        self.repetitions.begin_turn();
        loop {
            let watch = Watch::start(self.child.id());
            self.ask(Ask::Turn)?;
            let said = self.answer(TIMEOUT)?;
            let (disturbance, memory) = watch.stop();
            self.measured.peak_bytes = self.measured.peak_bytes.max(memory);
            if disturbance.is_too_much() && self.repetitions.take_one() {
                continue;
            }
            let Said::Turn(turn) = said else { bail!("{}: unexpected answer {said:?}", self.measured.contender) };
            self.measured.turns.push(Turn { disturbance, ..turn });
            return Ok(());
        }
    }

    /// Trains up to the next mark of a whole training with this seed, which this begins if it has not begun. Returns
    /// whether that was the last.
    ///
    /// # Errors
    /// When the process has ended.
    pub fn train_on(&mut self, seed: u32) -> Result<bool> {
        let watch = Watch::start(self.child.id());
        let begun = Instant::now();
        self.ask(if self.parts_of_whole.is_empty() { Ask::Whole(seed) } else { Ask::Mark })?;
        let said = self.answer(WHOLE_TIMEOUT)?;
        let seconds = begun.elapsed().as_secs_f64();
        self.parts_of_whole.push((seconds, watch.stop().0));
        match said {
            Said::Mark => Ok(false),
            Said::Whole(whole) => {
                let disturbance = Disturbance::mean(&std::mem::take(&mut self.parts_of_whole));
                self.measured.wholes.push(Whole { disturbance, ..whole });
                Ok(true)
            }
            other => bail!("{}: unexpected answer {other:?}", self.measured.contender),
        }
    }

    /// Records a few steps, and returns what the diagnosis says.
    ///
    /// # Errors
    /// When the process has ended.
    pub fn steps(&mut self) -> Result<Vec<String>> {
        self.ask(Ask::Steps)?;
        let Said::Steps { timeline, next } = self.answer(TIMEOUT)? else {
            bail!("{}: unexpected answer", self.measured.contender)
        };
        self.measured.timeline = timeline;
        Ok(next)
    }

    /// Ends the process.
    ///
    /// # Errors
    /// When the process fails.
    pub fn end(&mut self) -> Result<()> {
        drop(self.asks.take());
        if let Said::End { peak_device_bytes } = self.answer(TIMEOUT)? {
            self.measured.peak_device_bytes = peak_device_bytes;
        }
        let status = self.exit()?;
        ensure!(status.success(), "{} ended with {status}", self.measured.contender);
        Ok(())
    }

    /// Waits until the process has ended.
    fn exit(&mut self) -> Result<ExitStatus> {
        let begun = Instant::now();
        while begun.elapsed() < EXIT_TIMEOUT {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            thread::sleep(Duration::from_millis(20));
        }
        bail!("{} has not ended within a minute of its last answer", self.measured.contender)
    }

    fn ask(&mut self, ask: Ask) -> Result<()> {
        let asks = self.asks.as_mut().context("the process has ended")?;
        writeln!(asks, "{}", serde_json::to_string(&ask)?)?;
        Ok(asks.flush()?)
    }

    fn answer(&mut self, timeout: Duration) -> Result<Said> {
        let contender: Contender = self.measured.contender;
        let line = match self.answers.recv_timeout(timeout) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => {
                bail!("{contender} has not answered for {} minutes", timeout.as_secs() / 60)
            }
            Err(RecvTimeoutError::Disconnected) => {
                let status = self.exit()?;
                bail!("{contender} has ended ({status}); its message is above");
            }
        };
        serde_json::from_str(&line).with_context(|| format!("{contender}: unexpected answer: {}", line.trim()))
    }
}

/// How often a contender may still repeat a disturbed turn.
struct Repetitions {
    is_first_look: bool,
    left: usize,
}

impl Repetitions {
    fn new(is_first_look: bool) -> Self {
        Self { is_first_look, left: if is_first_look { FIRST_LOOK_REPETITIONS } else { MOST_REPETITIONS } }
    }

    fn begin_turn(&mut self) {
        if !self.is_first_look {
            self.left = MOST_REPETITIONS;
        }
    }

    /// Whether there is one.
    fn take_one(&mut self) -> bool {
        let is_left = self.left > 0;
        self.left = self.left.saturating_sub(1);
        is_left
    }
}

fn spawn(command: &mut Command, contender: Contender) -> Result<Child> {
    let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let program = Path::new(command.get_program()).display();
    spawned.with_context(|| format!("cannot start {}: {program} cannot be run", contender.title()))
}

impl Drop for Player {
    fn drop(&mut self) {
        // The process normally ends with its input; one that hangs is killed.
        drop(self.asks.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_first_look_repeats_less() {
        let repeated = |is_first_look| {
            let mut repetitions = Repetitions::new(is_first_look);
            let turns = (0..3).map(|_| {
                repetitions.begin_turn();
                (0..9).take_while(|_| repetitions.take_one()).count()
            });
            turns.collect::<Vec<_>>()
        };
        assert_eq!((repeated(false), repeated(true)), (vec![2, 2, 2], vec![1, 0, 0]));
    }

    #[test]
    fn a_program_that_cannot_be_started_is_named() {
        let error = spawn(&mut Command::new("/no/such/program"), Contender::Tch).unwrap_err();
        let said = format!("{error:#}");
        assert!(said.starts_with("cannot start plain tch: /no/such/program cannot be run: No such file"), "{said}");
    }
}
