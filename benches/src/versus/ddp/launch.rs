//! From a launcher's start to the first sum of four ranks.

use std::io::{BufRead, BufReader};
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

/// As a rank of the launch: sums once and says so.
pub fn first_sum() -> Result<()> {
    let group = init_process_group(Backend::Gloo, InitMethod::Auto)?;
    let mut sum = Tensor::from(group.rank() as i64);
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    ensure!(sum.int64_value(&[]) == RANKS * (RANKS - 1) / 2, "a wrong sum");
    if group.rank() == 0 {
        println!("{SUMMED}");
    }
    // The store's rank goes last.
    Ok(group.barrier()?)
}

pub fn compare(options: &Options, findings: &mut Findings) -> Result<()> {
    let own = std::env::current_exe()?;
    let launcher = own.with_file_name("overdrive-run");
    ensure!(launcher.exists(), "no overdrive-run beside {}: cargo build --release -p overdrive-launch", own.display());
    let folder = tempfile::tempdir()?;
    let script = folder.path().join("first_sum.py");
    std::fs::write(&script, include_str!("../../../peers/ddp_first_sum.py"))?;
    // A program that only says whether there is a torch.
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
    turns.compare(findings, CASE, ("overdrive-run", "torchrun"), Some(Target::AtMost(0.3)))
}

/// Until the sum is there; then waits for the end, which does not count.
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
    ensure!(child.wait()?.success(), "the launch has failed; see above");
    Ok(took.context("no sum")?.as_secs_f64() * 1e3)
}
