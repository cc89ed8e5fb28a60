//! Ranks as processes: how they start, what they are told, and how they end.

use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use overdrive_fakecuda::{Fake, environment};

use super::SCENARIOS;

const TOLD: &str = "OVERDRIVE_GPU_TESTS_RANK";

/// After it, ranks that still run are killed, and the test fails.
const LIMIT: Duration = Duration::from_secs(500);

/// Between two looks at a process.
const PAUSE: Duration = Duration::from_millis(5);

/// What a rank is told.
pub struct Meeting {
    pub rank: usize,
    pub size: usize,
    /// The file to meet in. Its folder is the test's own.
    pub file: PathBuf,
    pub arguments: Vec<String>,
}

/// Runs a scenario, if this process is a rank.
pub fn main_if_told() -> Option<Result<()>> {
    let told = std::env::var(TOLD).ok()?;
    Some(rank(&told).inspect_err(|error| eprintln!("{error:#}")))
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

/// A process under way; what it prints is read meanwhile. It is killed when this is dropped.
pub struct Running {
    child: Child,
    pipes: Option<[JoinHandle<String>; 2]>,
}

impl Running {
    /// Starts a program, on the fake devices if this process has them.
    pub fn start(mut command: Command, devices: usize) -> Result<Self> {
        if Fake::get().is_some() {
            command.envs(environment(devices));
        }
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().context("cannot start a rank")?;
        let (output, errors) = (child.stdout.take().context("no output")?, child.stderr.take().context("no errors")?);
        Ok(Self { child, pipes: Some([read(output), read(errors)]) })
    }

    pub fn kill(&mut self) -> Result<()> {
        Ok(self.child.kill()?)
    }

    /// Whether it has not ended.
    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// Waits for its end.
    pub fn end(mut self, since: Instant) -> Result<Ended> {
        while self.is_running()? {
            if since.elapsed() > LIMIT {
                self.kill()?;
                let Ended { output, errors, .. } = self.read()?;
                bail!("it still ran after {LIMIT:?}:\n{output}\n{errors}");
            }
            std::thread::sleep(PAUSE);
        }
        self.read()
    }

    /// How it ended.
    fn read(mut self) -> Result<Ended> {
        let status = self.child.wait()?;
        let [output, errors] = self.pipes.take().context("its output was read before")?.map(JoinHandle::join);
        let text = |text: std::thread::Result<String>| text.map_err(|_| anyhow::anyhow!("its output cannot be read"));
        Ok(Ended { status, output: text(output)?, errors: text(errors)? })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // One that has ended cannot be killed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read(mut pipe: impl Read + Send + 'static) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = pipe.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Waits for processes that all have to succeed. The first that fails says why; the others are killed, for they may
/// wait for it.
pub fn all_succeed(mut running: Vec<Running>, since: Instant) -> Result<Vec<Ended>> {
    loop {
        let mut left = 0;
        for rank in 0..running.len() {
            match running[rank].child.try_wait()? {
                None => left += 1,
                Some(status) if status.success() => {}
                Some(status) => {
                    let Ended { output, errors, .. } = running.swap_remove(rank).read()?;
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
    Running::start(command, meeting.size)
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
