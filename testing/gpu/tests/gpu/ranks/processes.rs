//! Ranks as processes: how they start, what they are told, and how they end.

use std::path::PathBuf;
use std::process::{Command, ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use overdrive_fakecuda::{Fake, environment};
use overdrive_forks::{Process, serve_if_told};

use super::SCENARIOS;

const TOLD: &str = "OVERDRIVE_GPU_TESTS_RANK";

/// After it, ranks that still run are killed, and the test fails.
const LIMIT: Duration = Duration::from_secs(500);

/// Between two looks at a process.
const PAUSE: Duration = Duration::from_millis(5);

/// What a rank is told.
#[derive(Clone)]
pub struct Meeting {
    pub rank: usize,
    pub size: usize,
    /// The file to meet in. Its folder is the test's own.
    pub file: PathBuf,
    pub arguments: Vec<String>,
}

/// Forks ranks or runs a scenario, if this process is there for that.
pub fn main_if_told() -> Option<ExitCode> {
    let told = || std::env::var(TOLD).ok();
    let run = |told: &str| match rank(told) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    };
    serve_if_told(|| run(&told().unwrap_or_default())).or_else(|| told().map(|told| run(&told)))
}

fn rank(told: &str) -> Result<()> {
    let mut words = told.split(',').map(str::to_owned);
    let mut next = || words.next().with_context(|| format!("{told:?} is not what a rank is told"));
    let (name, rank, size, file) = (next()?, next()?.parse()?, next()?.parse()?, next()?.into());
    let meeting = Meeting { rank, size, file, arguments: words.collect() };
    let scenario = SCENARIOS.iter().find(|(known, _)| *known == name).context("no such scenario")?.1;
    tch::set_num_threads(1);
    if let Some(fake) = Fake::get() {
        fake.compute().map_err(anyhow::Error::msg)?;
    }
    scenario(&meeting)
}

/// How a process ended.
pub struct Ended {
    pub status: ExitStatus,
    pub output: String,
    pub errors: String,
}

impl Ended {
    /// What it printed after this word, line by line.
    pub fn lines(&self, word: &str) -> Vec<&str> {
        self.output.lines().filter_map(|line| line.strip_prefix(word)?.strip_prefix(' ')).collect()
    }
}

/// A process under way. It is killed when this is dropped.
pub struct Running(Process);

impl Running {
    /// Starts a program, on the fake devices if this process has them.
    pub fn start(command: Command, devices: usize) -> Result<Self> {
        Ok(Self(Process::start(on_devices(command, devices)).context("cannot start a rank")?))
    }

    /// Forks this program; the arguments of the command are not used.
    fn fork(command: Command, devices: usize) -> Result<Self> {
        Ok(Self(Process::fork(&on_devices(command, devices)).context("cannot fork a rank")?))
    }

    pub fn kill(&mut self) -> Result<()> {
        Ok(self.0.kill()?)
    }

    /// Whether it has not ended.
    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.0.try_wait()?.is_none())
    }

    /// Waits for its end.
    pub fn end(mut self, since: Instant) -> Result<Ended> {
        while self.is_running()? {
            if since.elapsed() > LIMIT {
                self.kill()?;
                let [output, errors] = self.0.written()?;
                bail!("it still ran after {LIMIT:?}:\n{output}\n{errors}");
            }
            std::thread::sleep(PAUSE);
        }
        let status = self.0.try_wait()?.context("it has not ended")?;
        let [output, errors] = self.0.written()?;
        Ok(Ended { status, output, errors })
    }
}

fn on_devices(mut command: Command, devices: usize) -> Command {
    if Fake::get().is_some() {
        command.envs(environment(devices));
    }
    command
}

/// Waits for processes that all have to succeed. The first that fails says why; the others are killed, for they may
/// wait for it.
pub fn all_succeed(mut running: Vec<Running>, since: Instant) -> Result<Vec<Ended>> {
    loop {
        let mut left = 0;
        for (rank, Running(process)) in running.iter_mut().enumerate() {
            match process.try_wait()? {
                None => left += 1,
                Some(status) if status.success() => {}
                Some(status) => {
                    let [output, errors] = process.written()?;
                    bail!("rank {rank}: {status}\n{output}\n{errors}");
                }
            }
        }
        if left == 0 || since.elapsed() > LIMIT {
            return running.into_iter().map(|running| running.end(since)).collect();
        }
        std::thread::sleep(PAUSE);
    }
}

/// Starts a rank of this program.
pub fn start(scenario: &str, meeting: &Meeting, variables: &[(&str, &str)]) -> Result<Running> {
    let mut command = Command::new(std::env::current_exe()?);
    let told = [scenario.to_owned(), meeting.rank.to_string(), meeting.size.to_string()];
    let file = meeting.file.to_string_lossy().into_owned();
    let told: Vec<String> = told.into_iter().chain([file]).chain(meeting.arguments.clone()).collect();
    command.env(TOLD, told.join(",")).envs(variables.iter().copied());
    // libtorch reads some variables while it is loaded.
    if variables.is_empty() { Running::fork(command, meeting.size) } else { Running::start(command, meeting.size) }
}

/// Runs a scenario on all ranks, which have to succeed.
pub fn run(scenario: &str, size: usize, arguments: &[&str]) -> Result<Vec<Ended>> {
    let (folder, since) = (tempfile::tempdir()?, Instant::now());
    let arguments: Vec<String> = arguments.iter().map(|&word| word.to_owned()).collect();
    let rank = |rank| {
        start(scenario, &Meeting { rank, size, file: folder.path().join("meet"), arguments: arguments.clone() }, &[])
    };
    all_succeed((0..size).map(rank).collect::<Result<_>>()?, since)
}

/// Runs a scenario in one process that sees so many devices.
pub fn run_alone(scenario: &str, devices: usize, arguments: &[&str]) -> Result<Ended> {
    let (folder, since) = (tempfile::tempdir()?, Instant::now());
    let arguments = arguments.iter().map(|&word| word.to_owned()).collect();
    let meeting = Meeting { rank: devices - 1, size: devices, file: folder.path().join("meet"), arguments };
    let ended = all_succeed(vec![start(scenario, &meeting, &[])?], since)?;
    ended.into_iter().next().context("it did not run")
}
