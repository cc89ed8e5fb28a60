//! `versus shard`: the memory of ZeRO's stages beside plain data parallelism, the largest model under a cap, and steps beside
//! PyTorch's `ZeroRedundancyOptimizer` and `fully_shard`.

pub mod rank;
mod run;

use std::cell::RefCell;
use std::process::Command;

use anyhow::Result;
use overdrive_bench_report::{Machine, Ratio, Target, VersusReport};

use super::Options;
use super::ddp::rank::{set_variables, start};
use super::peer::Peer;
use super::turns::{Case, Findings, Program, Turns};

const PAIRS: u32 = 9;
/// Steps in a sample of time.
const STEPS: u32 = 6;
const RANKS: usize = 4;
/// Of libtorch's allocator, for a rank of the largest model.
const CAP: u32 = 128 << 20;
/// Blocks that are tried at most, as a multiple of what one process can have.
const MOST: u32 = 16;

/// A way to partition, and what a rank may take of plain data parallelism's memory: in float32, and in bfloat16 with
/// float32 masters.
const STAGES: [(&str, &str, f64, f64); 3] =
    [("zero1", "ZeRO-1", 0.65, 0.46), ("zero2", "ZeRO-2", 0.47, 0.38), ("zero3", "ZeRO-3", 0.30, 0.30)];

pub fn measure(options: &Options) -> Result<VersusReport> {
    let mut findings = Findings::default();
    memory(&mut findings)?;
    largest(&mut findings)?;
    let version = steps(options, &mut findings)?;
    let ours = [("overdrive", env!("CARGO_PKG_VERSION")), ("tch", "0.24.0"), ("libtorch", "2.11.0")];
    let mut versions: overdrive_bench_report::Versions =
        ours.map(|(name, version)| (name.to_owned(), version.to_owned())).into();
    versions.extend(version.map(|version| ("torch (Python)".to_owned(), version)));
    Ok(findings.report(Machine::detect(None), versions))
}

/// New ranks of this program, which answer a request alike.
fn ranks(size: usize) -> Result<Peer> {
    start(size, |rank, port| {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("shard-rank");
        set_variables(&mut command, (rank, size), port);
        Ok(command)
    })
}

/// What the rank with the most bytes takes at the peak of three steps: what libtorch allocates, and the resident set.
fn memory(findings: &mut Findings) -> Result<()> {
    for (dtype, name) in [("float", "float32"), ("bfloat16", "bfloat16 with float32 masters")] {
        for (what, bytes) in [("peak", "bytes of tensors"), ("resident", "resident set")] {
            let mut turns = Turns::default();
            for way in ["plain", "zero1", "zero2", "zero3"] {
                // Each in new processes, which have freed nothing before.
                turns.ours(way, move || ranks(RANKS)?.measure(&format!("{what}-{way}-{dtype}"), run::BLOCKS));
            }
            turns.once(&format!("shard, {bytes}, {name}"))?;
            for (way, title, float, half) in STAGES {
                let text = format!(
                    "{bytes} of a rank at the peak of a step, {title} of plain data parallelism, {name}, AdamW, 100.7 million \
                     parameters, {RANKS} ranks"
                );
                let most = if dtype == "float" { float } else { half };
                let target = (what == "peak").then_some(Target::AtMost(most));
                let case = Case { text: &text, unit: "B", ratio: Ratio::ShareOfCost };
                turns.compare(findings, case, (way, "plain"), target)?;
            }
        }
    }
    Ok(())
}

/// How many blocks can be trained at most with memory for tensors capped on each rank.
fn largest(findings: &mut Findings) -> Result<()> {
    let fits = |way: &str, size: usize, blocks: u32| -> Result<bool> {
        Ok(ranks(size)?.measure(&format!("capped-{way}-{CAP}"), blocks)? == 1.0)
    };
    let most = |way: &str, size: usize, limit: u32| -> Result<u32> {
        let (mut fitting, mut too_many) = (0, limit + 1);
        while too_many - fitting > 1 {
            let middle = fitting + (too_many - fitting) / 2;
            eprintln!("shard, largest model: {way}, {middle} blocks");
            if fits(way, size, middle)? { fitting = middle } else { too_many = middle }
        }
        Ok(fitting)
    };
    let alone = most("plain", 1, 64)?;
    let plain = most("plain", RANKS, 64)?;
    let (sharded, on_disk) = (most("zero3", RANKS, MOST * plain)?, most("disk", RANKS, MOST * alone)?);
    let mut turns = Turns::default();
    for (way, blocks) in [("one process", alone), ("plain", plain), ("zero3", sharded), ("disk", on_disk)] {
        turns.ours(way, move || Ok(f64::from(blocks)));
    }
    turns.once("shard, largest model")?;
    let size = "blocks of 0.26 million parameters that train with AdamW under 128 MiB of tensors a rank (16 times the \
                other's are tried at most), 4 ranks";
    for (way, peer, text, least) in [
        ("zero3", "plain", format!("{size}, ZeRO-3 of plain data parallelism"), 3.2),
        ("disk", "one process", format!("{size}, ZeRO-3 with files of one process without"), 8.0),
    ] {
        let case = Case { text: &text, unit: "blocks", ratio: Ratio::ShareOfCost };
        turns.compare(findings, case, (way, peer), Some(Target::AtLeast(least)))?;
    }
    Ok(())
}

/// Steps on two ranks. Returns the version of Python's torch.
fn steps(options: &Options, findings: &mut Findings) -> Result<Option<String>> {
    let ours = RefCell::new(ranks(2)?);
    let theirs = start(2, |rank, port| {
        let mut command = Command::new(&options.python);
        command.args(["-c", include_str!("../../../peers/shard.py")]).env_remove("LD_LIBRARY_PATH");
        set_variables(&mut command, (rank, 2), port);
        Ok(command)
    });
    let theirs = Program::together(theirs, "see `cargo xtask setup`");
    let mut turns = Turns::default();
    let milliseconds =
        |peer: &mut Peer, way: &str| Ok(peer.measure(&format!("step-{way}-float"), STEPS)? * 1e3 / f64::from(STEPS));
    let peers =
        [("zero1", "PyTorch ZeroRedundancyOptimizer, AdamW(fused=True)"), ("zero3", "PyTorch fully_shard, AdamW")];
    for (way, peer) in peers {
        let ours = &ours;
        turns.ours(way, move || milliseconds(&mut ours.borrow_mut(), way));
        turns.peer(peer, &theirs, move |peer| milliseconds(peer, way));
    }
    turns.take("shard, steps", options.pairs.unwrap_or(PAIRS))?;
    for (way, peer) in peers {
        let text = format!(
            "training step with AdamW, {}, MLP of 10.0 million parameters, 2 ranks over Gloo, one thread each, 32 samples a rank",
            if way == "zero1" { "ZeRO-1" } else { "ZeRO-3" }
        );
        let case = Case { text: &text, unit: "ms", ratio: Ratio::ShareOfCost };
        turns.compare(findings, case, (way, peer), Some(Target::AtMost(1.0)))?;
    }
    Ok(theirs.version())
}
