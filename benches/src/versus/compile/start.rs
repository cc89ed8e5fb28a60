//! A process that trains compiled or not: when its first steps are done, and the memory it takes.

use std::cell::Cell;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use overdrive::tch::Device;
use overdrive_bench_report::{Ratio, Target};

use super::models::{self, Way};
use crate::versus::Options;
use crate::versus::memory::disk::told_by_system;
use crate::versus::turns::{Case, Findings, Turns};

const PAIRS: u32 = 9;
/// Tells the process what to train: the model's name, and `compiled` or not.
const TOLD: &str = "OVERDRIVE_VERSUS_COMPILE_START";
/// Three are recorded, so the fourth is the first compiled one.
const FIRST: u32 = 4;
const ALL: u32 = 50;

/// Runs such a process: says that the first steps are done, and at the end the most memory that it took, in KiB, and how
/// much of it is pages of programs and libraries.
pub fn serve() -> Result<()> {
    let told = std::env::var(TOLD).context("`compile-start` is started by `compile`")?;
    let (model, way) = told.split_once(' ').context("no way was told")?;
    let way = if way == "compiled" { Way::Compiled } else { Way::Uncompiled };
    overdrive::tch::set_num_threads(1);
    let mut step = models::step(model, way, Device::Cpu)?;
    for _ in 0..FIRST {
        step()?;
    }
    println!("started");
    for _ in FIRST..ALL {
        step()?;
    }
    println!("{} {}", told_by_system("status", "VmHWM:")?, told_by_system("status", "RssFile:")?);
    Ok(())
}

/// What a process takes.
#[derive(Clone, Copy)]
struct Taken {
    /// Until the first steps are done.
    seconds: f64,
    /// Its largest resident set.
    mib: f64,
    /// The same without pages of programs and libraries, which all processes share: they are code that has run, and stay.
    own_mib: f64,
}

type Of = fn(Taken) -> f64;

fn run(model: &str, way: &str) -> Result<Taken> {
    let begun = Instant::now();
    let mut command = Command::new(std::env::current_exe()?);
    let mut child: Child =
        command.arg("compile-start").env(TOLD, format!("{model} {way}")).stdout(Stdio::piped()).spawn()?;
    let mut lines = BufReader::new(child.stdout.take().context("no output")?).lines();
    ensure!(lines.next().transpose()?.as_deref() == Some("started"), "the process has not started");
    let seconds = begun.elapsed().as_secs_f64();
    let told = lines.next().transpose()?.context("no peak")?;
    let (peak, code) = told.split_once(' ').context("no pages of code")?;
    let (peak, code): (f64, f64) = (peak.parse()?, code.parse()?);
    ensure!(child.wait()?.success(), "the process has failed");
    Ok(Taken { seconds, mib: peak / 1024.0, own_mib: (peak - code) / 1024.0 })
}

/// What loading a package may take, in seconds.
const LOADING: f64 = 0.3;

pub fn compare(options: &Options, findings: &mut Findings) -> Result<()> {
    let pairs = options.pairs.unwrap_or(PAIRS);
    for model in ["mlp", "gpt"] {
        let memory: [(&str, Of); 2] = [
            ("peak memory of a process", |taken| taken.mib),
            ("peak memory of its own, without pages of code, of a process", |taken| taken.own_mib),
        ];
        for (text, of) in memory {
            let what = format!("{text} that trains the {model}, {ALL} steps");
            let mut turns = Turns::default();
            for way in ["compiled", "uncompiled"] {
                turns.ours(way, move || Ok(of(run(model, way)?)));
            }
            turns.take(&what, pairs)?;
            let case = Case { text: &what, unit: "MiB", ratio: Ratio::ShareOfCost };
            turns.compare(findings, case, ("compiled", "uncompiled"), Some(Target::AtMost(1.0)))?;
        }

        let what = format!("process start to the end of step {FIRST} of the {model}, package in the cache");
        let (last, with_loading) = (Cell::new(0.0), format!("uncompiled, and {LOADING} s"));
        let mut turns = Turns::default();
        turns.ours("compiled", || Ok(run(model, "compiled")?.seconds));
        turns.ours("uncompiled", || {
            last.set(run(model, "uncompiled")?.seconds);
            Ok(last.get())
        });
        turns.ours(&with_loading, || Ok(last.get() + LOADING));
        turns.take(&what, pairs)?;
        let case = Case { text: &what, unit: "s", ratio: Ratio::ShareOfCost };
        turns.compare(findings, case, ("compiled", "uncompiled"), None)?;
        turns.compare(findings, case, ("compiled", &with_loading), Some(Target::AtMost(1.0)))?;
    }
    Ok(())
}
