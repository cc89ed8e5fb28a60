//! The time from the start of a launcher to the first all-reduce of four ranks.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use overdrive_bench_report::{Ratio, Target};
use overdrive_ddp::{Backend, InitMethod, ReduceOp, init_process_group};
use tch::Tensor;

use crate::versus::Options;
use crate::versus::peer::Peer;
use crate::versus::turns::{Case, Findings, Program, Turns};

const PAIRS: u32 = 7;
const RANKS: i64 = 4;
const SUMMED: &str = "the first sum is there";
const CASE: Case<'_> =
    Case { text: "launch of 4 ranks to the first all-reduce", unit: "ms", ratio: Ratio::ShareOfCost };

/// Runs a rank of the launch: it takes part in one all-reduce, which rank 0 reports.
pub fn first_sum() -> Result<()> {
    let group = init_process_group(Backend::Gloo, InitMethod::Auto)?;
    let mut sum = Tensor::from(group.rank() as i64);
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    ensure!(sum.int64_value(&[]) == RANKS * (RANKS - 1) / 2, "the all-reduce gave a wrong sum");
    if group.rank() == 0 {
        println!("{SUMMED}");
    }
    // Rank 0 holds the store, which the others need until they are done.
    Ok(group.barrier()?)
}

/// The launcher, which `cargo xtask versus` builds beside this program.
pub fn launcher() -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let launcher = own.with_file_name("overdrive-run");
    ensure!(
        launcher.exists(),
        "no overdrive-run beside {}; run `cargo build --release -p overdrive-launch`",
        own.display()
    );
    Ok(launcher)
}

pub fn compare(options: &Options, findings: &mut Findings) -> Result<()> {
    let (own, launcher) = (std::env::current_exe()?, launcher()?);
    let folder = tempfile::tempdir()?;
    let script = folder.path().join("first_sum.py");
    std::fs::write(&script, include_str!("../../../peers/ddp_first_sum.py"))?;
    // This peer only shows whether Python has torch: torchrun is started anew for each sample.
    let probe = Program::start(
        &options.python,
        "import torch, torch.distributed; print(torch.__version__); input()",
        &serde_json::Value::Null,
        "see `cargo xtask setup`",
    );
    let mut turns = Turns::default();
    turns.ours("overdrive-run", || {
        let mut command = Command::new(&launcher);
        command.args(["--nproc-per-node", "4"]).arg(&own).arg("ddp-first-sum");
        milliseconds(command)
    });
    turns.peer("torchrun", &probe, |_: &mut Peer| {
        let mut command = Command::new(&options.python);
        command.args(["-m", "torch.distributed.run", "--nproc-per-node", "4"]).arg(&script);
        milliseconds(command)
    });
    turns.take("ddp, launch", options.pairs.unwrap_or(PAIRS))?;
    turns.compare(findings, CASE, ("overdrive-run", "torchrun"), Some(Target::AtMost(0.15)))
}

/// Milliseconds until the first all-reduce is done. The end of the ranks is waited for, but not timed.
fn milliseconds(mut command: Command) -> Result<f64> {
    let started = Instant::now();
    let mut child = command.env("OMP_NUM_THREADS", "1").stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let output = BufReader::new(child.stdout.take().context("no standard output")?);
    let mut took = None;
    for line in output.lines() {
        if line?.contains(SUMMED) {
            took = Some(started.elapsed());
        }
    }
    ensure!(child.wait()?.success(), "the launch failed; its error is above");
    Ok(took.context("the launch ended without an all-reduce")?.as_secs_f64() * 1e3)
}
