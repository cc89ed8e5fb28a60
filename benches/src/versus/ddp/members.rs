//! The time from a change of an elastic run's hosts to the first step of the hosts that are there then.

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use overdrive::prelude::*;
use overdrive_bench_report::{Ratio, Target};
use overdrive_ddp::{Backend, DistributedDataParallel, InitMethod, init_process_group};
use tch::nn::{self, Module, VarStore};

use super::launch::launcher;
use super::port::free_port;
use crate::versus::Options;
use crate::versus::turns::{Case, Findings, Turns};

const PAIRS: u32 = 9;
const LIMIT: &str = "5 s";
const LIMIT_SECONDS: f64 = 5.0;
/// What a rank waits after each step, so that those that start have the cores.
const PAUSE: Duration = Duration::from_millis(5);
const STEP: &str = "a step of ";

/// Runs a rank: it trains a model of one small layer without an end. Rank 0 tells of each step, when it ended and when
/// the rank began.
pub fn train() -> Result<()> {
    let began = now()?;
    tch::set_num_threads(1);
    let group = init_process_group(Backend::Gloo, InitMethod::Auto)?;
    let vs = VarStore::new(Device::Cpu);
    let model = nn::linear(vs.root(), 4, 4, nn::LinearConfig::default());
    let ddp = DistributedDataParallel::new(&vs, &group)?;
    let mut opt = AdamW::builder(vs.trainable_variables()).lr(1e-3).build()?;
    let inputs = Tensor::ones([8, 4], (Kind::Float, Device::Cpu));
    loop {
        let loss = ddp.forward(|| model.forward(&inputs))?.square().mean(Kind::Float);
        ddp.backward(&loss)?;
        opt.step()?;
        opt.zero_grad()?;
        if group.rank() == 0 {
            println!("{STEP}{} {} {began}", group.size(), now()?);
        }
        thread::sleep(PAUSE);
    }
}

/// Seconds since 1970: ranks and this program are on one machine.
fn now() -> Result<f64> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64())
}

pub fn compare(options: &Options, findings: &mut Findings) -> Result<()> {
    let run = RefCell::new(Run::start()?);
    let mut turns = Turns::default();
    turns.ours("lost", || run.borrow_mut().lose());
    turns.ours("joins", || run.borrow_mut().join());
    turns.ours(LIMIT, || Ok(LIMIT_SECONDS));
    turns.take("ddp, members", options.pairs.unwrap_or(PAIRS))?;
    for (way, what) in [("lost", "the loss of one of 2 launchers"), ("joins", "the start of a second launcher")] {
        let text = format!("from {what} to the end of the next step, an elastic run over Gloo on one host");
        let case = Case { text: &text, unit: "s", ratio: Ratio::ShareOfCost };
        turns.compare(findings, case, (way, LIMIT), Some(Target::AtMost(1.0)))?;
    }
    Ok(())
}

/// An elastic run of two launchers, each with one rank, as on two hosts.
struct Run {
    launcher: PathBuf,
    port: u16,
    first: Child,
    /// What the first launcher passes on of rank 0.
    steps: BufReader<ChildStdout>,
    second: Option<Child>,
}

impl Run {
    fn start() -> Result<Self> {
        let (launcher, port) = (launcher()?, free_port());
        let mut first = start(&launcher, port, 0)?;
        let steps = BufReader::new(first.stdout.take().context("no standard output")?);
        let mut run = Self { launcher, port, first, steps, second: None };
        run.second = Some(start(&run.launcher, port, 1)?);
        run.since(now()?, 2)?;
        Ok(run)
    }

    /// Kills the second launcher, and so its rank. Returns the seconds to the end of the first step without it.
    fn lose(&mut self) -> Result<f64> {
        let mut second = self.second.take().context("the second launcher is not there")?;
        let at = now()?;
        second.kill()?;
        second.wait()?;
        self.since(at, 1)
    }

    /// Starts the second launcher. Returns the seconds to the end of the first step with it.
    fn join(&mut self) -> Result<f64> {
        let at = now()?;
        self.second = Some(start(&self.launcher, self.port, 1)?);
        self.since(at, 2)
    }

    /// Seconds from `at` to the end of the next step of so many ranks.
    fn since(&mut self, at: f64, ranks: usize) -> Result<f64> {
        for line in self.steps.by_ref().lines() {
            let line = line?;
            // After the prefix of the rank.
            let Some((_, step)) = line.split_once(STEP) else { continue };
            let numbers = step.split(' ').map(str::parse).collect::<Result<Vec<f64>, _>>()?;
            if let [size, ended, began] = numbers[..]
                && size == ranks as f64
            {
                eprintln!(
                    "{ranks} ranks: {:.2} s, of it {:.2} s until rank 0's program was loaded",
                    ended - at,
                    began - at
                );
                return Ok(ended - at);
            }
        }
        bail!("the run has ended; its error is above")
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // Its ranks are killed with a launcher.
        for launcher in [Some(&mut self.first), self.second.as_mut()].into_iter().flatten() {
            let _ = launcher.kill();
            let _ = launcher.wait();
        }
    }
}

fn start(launcher: &Path, port: u16, node: usize) -> Result<Child> {
    let mut command = Command::new(launcher);
    command.args(["--nnodes", "1:2", "--insecure", "--node-rank", &node.to_string()]);
    command.args(["--rdzv-endpoint", &format!("127.0.0.1:{port}")]);
    command
        .arg(std::env::current_exe()?)
        .arg("ddp-member")
        .env("OMP_NUM_THREADS", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    // What a rank says that misses its peer is expected.
    command.env_remove("RUST_BACKTRACE");
    command.spawn().with_context(|| format!("cannot run {}", launcher.display()))
}
