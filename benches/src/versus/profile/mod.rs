//! `versus profile`: the diagnosis' bounds against the gains of its remedies, and the cost of profiling, against
//! PyTorch's profiler where it has a counterpart.

mod bounds;
mod cost;
mod timing;

use std::cell::RefCell;
use std::time::Instant;

use anyhow::Result;
use overdrive_bench_report::{Machine, VersusReport};
use serde_json::json;

use super::Options;
use super::turns::{Findings, Program};

pub fn measure(options: &Options) -> Result<VersusReport> {
    tch::set_num_threads(1);
    let folder = tempfile::tempdir()?;
    let peer = include_str!("../../../peers/profiler.py");
    let program = Program::start(&options.python, peer, &json!({ "folder": folder.path() }), "see `cargo xtask setup`");
    let ours = [("overdrive", env!("CARGO_PKG_VERSION")), ("tch", "0.24.0"), ("libtorch", "2.11.0")];
    let mut versions: overdrive_bench_report::Versions =
        ours.map(|(name, version)| (name.to_owned(), version.to_owned())).into();
    if let Some(version) = program.version() {
        versions.insert("torch (Python)".to_owned(), version);
    }
    let mut findings = Findings::default();
    cost::compare(options.pairs, &program, folder.path(), &mut findings)?;
    timing::compare(options.pairs, &mut findings)?;
    bounds::compare(options.pairs, &mut findings)?;
    Ok(findings.report(Machine::detect(None), versions))
}

/// A training step.
type Step = Box<dyn FnMut() -> Result<()>>;

/// Seconds per step.
fn time(step: &RefCell<Step>, steps: u32) -> Result<f64> {
    let mut step = step.borrow_mut();
    let started = Instant::now();
    for _ in 0..steps {
        (*step)()?;
    }
    Ok(started.elapsed().as_secs_f64() / f64::from(steps))
}
