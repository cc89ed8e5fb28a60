//! `versus ddp`: training on two ranks against PyTorch's DDP, a launch against torchrun, changes of an elastic run's
//! hosts, and communication hooks over a slow link.

pub mod launch;
mod link;
pub mod members;
#[path = "../../../../crates/launch/tests/launch/port.rs"]
mod port;
pub mod rank;

use std::cell::RefCell;
use std::process::Command;

use anyhow::Result;
use overdrive_bench_report::versus::SCHEMA;
use overdrive_bench_report::versus_cli::DdpPart as Part;
use overdrive_bench_report::{Machine, Ratio, Target, VersusReport};

use super::Options;
use super::peer::{KEEPS_MEMORY, Peer};
use super::turns::{Case, Findings, Program, Turns};

const PAIRS: u32 = 9;
const RANKS: usize = 2;
const STEPS: &str = "2 ranks over Gloo, one thread each, 32 samples a rank, freed memory kept";
/// All-reduces of one number per sample.
const SUMS: u32 = 300;
/// Each model's name in requests, its name in rows, and its steps per sample.
const MODELS: [(&str, &str, u32); 2] =
    [("cnn", "MNIST CNN, 105,866 parameters", 40), ("mlp", "MLP of 10.0 million parameters", 8)];

/// PyTorch at its best setting, in the rows of steps.
const STEP: &str = "PyTorch DDP, AdamW(fused=True)";
const LOCAL: &str = "PyTorch DDP, AdamW(fused=True) ";
/// Names of PyTorch DDP in the rows of hidden communication and of overlap. They differ only in trailing blanks:
/// recorded reports have these names.
const HIDDEN: &str = "PyTorch DDP ";
const OVERLAP: &str = "PyTorch DDP  ";

pub fn measure(options: &Options) -> Result<VersusReport> {
    let ours = [("overdrive", env!("CARGO_PKG_VERSION")), ("tch", "0.24.0"), ("libtorch", "2.11.0")];
    let mut report = VersusReport {
        schema: SCHEMA,
        machine: Machine::detect(None),
        versions: ours.map(|(name, version)| (name.to_owned(), version.to_owned())).into(),
        ..VersusReport::default()
    };
    let mut findings = Findings::default();
    if options.ddp.has(Part::Launch) {
        launch::compare(options, &mut findings)?;
    }
    if options.ddp.has(Part::Members) {
        members::compare(options, &mut findings)?;
    }
    let ranks = RefCell::new(rank::start(RANKS, rank::command)?);
    if options.ddp.has(Part::Training)
        && let Some(version) = training(options, &ranks, &mut findings)?
    {
        report.versions.insert("torch (Python)".to_owned(), version);
    }
    link::compare(options, &ranks, &mut findings)?;
    (report.rows, report.missing) = (findings.rows, findings.missing);
    Ok(report)
}

/// Compares whole steps, and how much communication overlaps with backward. Returns the version of Python's torch.
fn training(options: &Options, ours: &RefCell<Peer>, findings: &mut Findings) -> Result<Option<String>> {
    let theirs = Program::together(python_ranks(options), "see `cargo xtask setup`");
    for (model, name, steps) in MODELS {
        let mut turns = Turns::default();
        let milliseconds = move |peer: &mut Peer, what: &str| {
            Ok(peer.measure(&format!("{model}_{what}"), steps)? * 1e3 / f64::from(steps))
        };
        for way in ["step", "SharedMemory", "local"] {
            turns.ours(way, move || milliseconds(&mut ours.borrow_mut(), way));
        }
        turns.peer(STEP, &theirs, move |peer| milliseconds(peer, "step"));
        turns.peer(LOCAL, &theirs, move |peer| milliseconds(peer, "local"));
        turns.ours("hidden", move || ours.borrow_mut().measure(&format!("{model}_hidden"), steps));
        turns.peer(HIDDEN, &theirs, move |peer| peer.measure(&format!("{model}_hidden"), steps));
        turns.ours("overlap", move || Ok(ours.borrow_mut().measure(&format!("{model}_overlap"), steps)? * 1e3));
        turns.peer(OVERLAP, &theirs, move |peer| Ok(peer.measure(&format!("{model}_overlap"), steps)? * 1e3));
        turns.take(&format!("ddp, {model}"), options.pairs.unwrap_or(PAIRS))?;

        for (way, with, peer, target) in [
            ("step", "", STEP, Some(Target::AtMost(0.85))),
            ("SharedMemory", " and the hook SharedMemory", STEP, Some(Target::AtMost(0.85))),
            ("local", " in no_sync", LOCAL, None),
        ] {
            let text = format!("training step with AdamW{with}, {name}, {STEPS}");
            let case = Case { text: &text, unit: "ms", ratio: Ratio::ShareOfCost };
            turns.compare(findings, case, (way, peer), target)?;
        }
        let text = format!("share of the all-reduce hidden behind backward, {name}, {STEPS}");
        let case = Case { text: &text, unit: "of 1", ratio: Ratio::ShareOfCost };
        turns.compare(findings, case, ("hidden", HIDDEN), Some(Target::AtLeast(1.0)))?;
        let text = format!("time in which gradients travel behind backward, {name}, {STEPS}");
        let case = Case { text: &text, unit: "ms", ratio: Ratio::ShareOfCost };
        turns.compare(findings, case, ("overlap", OVERLAP), None)?;
    }
    let mut turns = Turns::default();
    let microseconds = |peer: &mut Peer| Ok(peer.measure("mlp_sum", SUMS)? * 1e6 / f64::from(SUMS));
    turns.ours("sum", move || microseconds(&mut ours.borrow_mut()));
    turns.peer("PyTorch", &theirs, microseconds);
    turns.take("ddp, sums", options.pairs.unwrap_or(PAIRS))?;
    let case = Case { text: "all-reduce of one number, 2 ranks over Gloo", unit: "us", ratio: Ratio::ShareOfCost };
    turns.compare(findings, case, ("sum", "PyTorch"), None)?;
    Ok(theirs.version())
}

/// Two ranks of Python's PyTorch, which keep their memory as ours do.
fn python_ranks(options: &Options) -> Result<Peer> {
    rank::start(RANKS, |rank, port| {
        let mut command = Command::new(&options.python);
        command.args(["-c", include_str!("../../../peers/ddp.py")]).env_remove("LD_LIBRARY_PATH");
        command.envs(KEEPS_MEMORY);
        rank::set_variables(&mut command, (rank, RANKS), port);
        Ok(command)
    })
}
