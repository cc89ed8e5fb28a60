//! Launchers: this program again, one for each node.

use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use overdrive_forks::Process;
use overdrive_launch::Launch;

use crate::hosts::{CABLE, Hosts};
use crate::moments::MARK;
use crate::rank;

/// What carries the collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    Gloo,
    /// On the stand-in.
    Nccl,
}

impl Transport {
    pub fn name(self) -> &'static str {
        match self {
            Self::Gloo => "gloo",
            Self::Nccl => "nccl",
        }
    }
}

/// `ranks nodes node host port store restarts milliseconds`: ranks of each node, this node, the endpoint, the port of the
/// ranks' store, the restarts that are allowed, and after how long a silent node is lost.
const LAUNCH: &str = "OVERDRIVE_FAULTS_LAUNCH";
/// Only against hanging: on an idle machine, a run takes a hundredth of it.
const LIMIT: Duration = Duration::from_secs(500);
const PAUSE: Duration = Duration::from_millis(2);
/// Ranks that do not end when they are told to are killed after this.
const GRACE: Duration = Duration::from_millis(300);

pub fn launch_if_told() -> Option<ExitCode> {
    let told = std::env::var(LAUNCH).ok().filter(|_| std::env::var_os("RANK").is_none())?;
    Some(launch(&told).unwrap_or_else(|error| {
        eprintln!("{error:#}");
        ExitCode::from(1)
    }))
}

fn launch(told: &str) -> Result<ExitCode> {
    let words: Vec<&str> = told.split(' ').collect();
    let [ranks, nodes, node, host, port, store, restarts, silence] = words[..] else { bail!("{told:?} is no launch") };
    let launch = Launch::current_program().nproc(ranks.parse()?).max_restarts(restarts.parse()?);
    let mut launch = launch.master_port(store.parse()?).grace_period(GRACE);
    if nodes != "1" {
        launch = launch.nnodes(nodes.parse()?).node_rank(node.parse()?).rdzv_endpoint(host, port.parse()?).insecure();
        launch = launch.keep_alive(Duration::from_millis(silence.parse()?) / 3, 3);
    }
    if std::env::var(rank::TRANSPORT)? == "nccl" {
        let devices = ranks.parse::<usize>()? * nodes.parse::<usize>()?;
        for (name, value) in overdrive_fakecuda::environment(devices) {
            launch = launch.env(name, value);
        }
        // Without it, the watchdog pauses for a minute before it ends a process.
        launch = launch.env("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1");
    }
    match launch.env("OMP_NUM_THREADS", "1").run() {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => {
            eprintln!("{error}");
            Ok(ExitCode::from(error.exit_code()))
        }
    }
}

/// How a run is launched.
pub struct Plan<'a> {
    pub transport: Transport,
    /// All ranks.
    pub ranks: usize,
    pub nodes: usize,
    pub restarts: u32,
    pub timeout: Duration,
    pub folder: &'a Path,
    pub mark: &'a str,
    pub hosts: Option<&'a Hosts>,
    /// Where the nodes meet, and the ranks.
    pub ports: [u16; 2],
    /// The fault of the first attempt.
    pub moment: Option<String>,
}

impl Plan<'_> {
    pub fn start(&self, node: usize) -> Result<Node> {
        let program = std::env::current_exe()?;
        let mut command = self.hosts.map_or_else(|| Command::new(&program), |hosts| hosts.command(node, &program));
        let host = self.hosts.map_or("127.0.0.1", |hosts| hosts.address(0));
        let temporary = self.folder.join("tmp");
        std::fs::create_dir_all(&temporary)?;
        let Self { ranks, nodes, restarts, ports: [port, store], timeout, .. } = self;
        // Later than the ranks' own timeout, so that their errors are told.
        let silence = (timeout.as_millis() + 1000) / 3 * 3;
        let told = format!("{} {nodes} {node} {host} {port} {store} {restarts} {silence}", ranks / nodes);
        command
            .env(LAUNCH, told)
            .env(rank::FOLDER, self.folder)
            .env(rank::TIMEOUT, timeout.as_millis().to_string())
            .env(rank::TRANSPORT, self.transport.name())
            .env(MARK, self.mark)
            .env("TMPDIR", temporary)
            .env_remove("RANK")
            .env_remove("RUST_BACKTRACE")
            .env_remove(rank::MOMENT)
            .envs(self.moment.as_ref().map(|moment| (rank::MOMENT, moment)));
        if self.hosts.is_some() {
            command.env("GLOO_SOCKET_IFNAME", CABLE);
        }
        Ok(Node { process: Process::start(command).context("cannot start a launcher")?, since: Instant::now() })
    }

    pub fn start_all(&self) -> Result<Vec<Node>> {
        (0..self.nodes).map(|node| self.start(node)).collect()
    }
}

/// A launcher under way. It is killed when this is dropped, and its ranks with it.
pub struct Node {
    process: Process,
    since: Instant,
}

impl Node {
    /// The exit code, if it has ended; -1 for a signal.
    pub fn ended(&mut self) -> Result<Option<i32>> {
        Ok(self.process.try_wait()?.map(|status| status.code().unwrap_or(-1)))
    }

    pub fn kill(&mut self) -> Result<()> {
        Ok(self.process.kill()?)
    }

    /// What it and its ranks have written so far.
    pub fn said(&self) -> Result<String> {
        Ok(self.process.written()?.concat())
    }

    /// Waits for its end.
    pub fn end(&mut self) -> Result<i32> {
        self.wait_for("its end", |node| node.ended())
    }

    /// Asks `whether` again and again, until there is an answer.
    pub fn wait_for<T>(&mut self, what: &str, mut whether: impl FnMut(&mut Self) -> Result<Option<T>>) -> Result<T> {
        loop {
            if let Some(answer) = whether(self)? {
                return Ok(answer);
            }
            if self.since.elapsed() > LIMIT {
                self.kill()?;
                bail!("{what} was waited for, for {LIMIT:?}:\n{}", self.said()?);
            }
            std::thread::sleep(PAUSE);
        }
    }
}
