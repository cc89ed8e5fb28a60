//! Starts ranks as processes and waits for them.

#[path = "../../../launch/tests/launch/port.rs"]
mod port;

use std::process::{Command, ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use overdrive_ddp::{Backend, InitMethod, ProcessGroup};
use overdrive_forks::Process;

pub use port::free_port;

pub type Scenario = fn(&Meeting) -> Result<()>;

pub const TOLD: &str = "OVERDRIVE_TEST_SCENARIO";
/// Only a limit against hanging: the longest run takes a fiftieth of it on an idle machine.
const LIMIT: Duration = Duration::from_secs(600);
/// How long ranks wait for each other where waiting is not what is tested.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// What this process should return, if it forks the ranks, or was forked as one.
pub fn forked(scenarios: &[(&str, Scenario)]) -> Option<ExitCode> {
    overdrive_forks::serve_if_told(|| rank_main(&told().context("no scenario was named")?, scenarios))
}

/// The scenario that this process should run, if it is a rank.
pub fn told() -> Option<String> {
    std::env::var(TOLD).ok()
}

/// How a rank meets the others, with the options that its scenario needs.
pub struct Meeting {
    pub rank: usize,
}

impl Meeting {
    pub fn group(&self) -> Result<ProcessGroup> {
        Ok(ProcessGroup::builder(Backend::Gloo).timeout(PATIENCE).init(&InitMethod::Auto)?)
    }

    /// A group with a long timeout for the rendezvous, and `timeout` for collectives.
    pub fn group_with(&self, timeout: Duration, verify: bool) -> Result<ProcessGroup> {
        let patience = match std::env::var("OVERDRIVE_TEST_IMPATIENT") {
            Ok(_) => timeout,
            Err(_) => PATIENCE,
        };
        let group = ProcessGroup::builder(Backend::Gloo).timeout(patience).verify(verify).init(&InitMethod::Auto)?;
        // The barrier makes all connections while the timeout is still long.
        group.barrier()?;
        group.set_timeout(timeout)?;
        Ok(group)
    }
}

pub fn rank_main(name: &str, scenarios: &[(&str, Scenario)]) -> Result<()> {
    let (_, scenario) = scenarios.iter().find(|(known, _)| *known == name).context("an unknown scenario")?;
    let rank = std::env::var("RANK").context("RANK")?.parse()?;
    tch::set_num_threads(1);
    if let Err(error) = scenario(&Meeting { rank }) {
        eprintln!("{error:#}");
        std::process::exit(1);
    }
    // The parent looks for this line: a rank that ended in another way has not printed it.
    println!("rank {rank} is through");
    Ok(())
}

/// How a rank ended.
pub struct Ended {
    pub status: ExitStatus,
    pub output: String,
    pub errors: String,
}

/// Starts one rank of a scenario; `vars` override the variables of a launcher.
pub fn start(scenario: &str, rank: usize, ranks: usize, port: u16, vars: &[(&str, &str)]) -> Result<Rank> {
    let mut command = Command::new("a fork of this program");
    tell(&mut command, scenario, rank, ranks, port, vars);
    Ok(Rank(Process::fork(&command)?))
}

/// The same by a command that executes this program, such as `ip netns exec`.
pub fn start_by(
    mut command: Command,
    scenario: &str,
    rank: usize,
    ranks: usize,
    port: u16,
    vars: &[(&str, &str)],
) -> Result<Rank> {
    tell(&mut command, scenario, rank, ranks, port, vars);
    Ok(Rank(Process::start(command)?))
}

fn tell(command: &mut Command, scenario: &str, rank: usize, ranks: usize, port: u16, vars: &[(&str, &str)]) {
    command
        .env(TOLD, scenario)
        .env("RANK", rank.to_string())
        .env("LOCAL_RANK", rank.to_string())
        .env("WORLD_SIZE", ranks.to_string())
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", port.to_string())
        .env("OMP_NUM_THREADS", "1")
        .env_remove("RUST_BACKTRACE")
        .envs(vars.iter().copied());
}

/// A rank under way.
pub struct Rank(Process);

impl Rank {
    pub fn kill(&mut self) -> Result<()> {
        Ok(self.0.kill()?)
    }

    pub fn try_wait(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.0.try_wait()?)
    }

    /// Waits for its end until the limit.
    pub fn end(self, started: Instant) -> Result<Ended> {
        self.end_within(LIMIT, started)
    }

    fn end_within(mut self, limit: Duration, started: Instant) -> Result<Ended> {
        let status = loop {
            if let Some(status) = self.try_wait()? {
                break status;
            }
            if started.elapsed() > limit {
                self.kill()?;
                let [output, errors] = self.0.written()?;
                bail!("still running at the limit of {limit:?}; its output:\n{output}{errors}");
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        let [output, errors] = self.0.written()?;
        Ok(Ended { status, output, errors })
    }
}

/// Runs a scenario on all ranks, each of which has to succeed.
pub fn run(scenario: &str, ranks: usize) -> Result<Vec<Ended>> {
    let port = free_port();
    let started = Instant::now();
    let all = (0..ranks).map(|rank| start(scenario, rank, ranks, port, &[])).collect::<Result<Vec<_>>>()?;
    all_through(all, started)
}

/// Waits for ranks that all have to succeed.
pub fn all_through(ranks: Vec<Rank>, started: Instant) -> Result<Vec<Ended>> {
    all_through_within(LIMIT, ranks, started)
}

/// The same with the caller's limit.
pub fn all_through_within(limit: Duration, ranks: Vec<Rank>, started: Instant) -> Result<Vec<Ended>> {
    let ended: Vec<_> = ranks.into_iter().map(|rank| rank.end_within(limit, started)).collect();
    let mut failures = String::new();
    let mut through = Vec::new();
    for (rank, ended) in ended.into_iter().enumerate() {
        match ended {
            Ok(ended) if ended.status.success() && ended.output.contains("is through") => through.push(ended),
            Ok(ended) => failures += &format!("rank {rank}: {}\n{}\n{}\n", ended.status, ended.output, ended.errors),
            Err(error) => failures += &format!("rank {rank}: {error:#}\n"),
        }
    }
    if failures.is_empty() { Ok(through) } else { bail!("{failures}") }
}
