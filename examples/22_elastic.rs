//! A run that loses a host and gets it back, and learns as if nothing had happened.
//!
//! Two launchers, as on two hosts, train a small transformer on Hamlet with one rank each. At step 25 the second one is
//! killed with SIGKILL: the first goes on alone from the last checkpoint. At step 65 the second one starts again, and
//! joins. The global batch is the same throughout, so the data goes on where it was.
//!
//! Expect: when the host is lost and is back, the error of the rank that misses its peer, and each step's loss as in a
//! run of two ranks that nothing has disturbed, except for rounding; in under a minute on a CPU.
//!
//!     cargo run -p overdrive-examples --example 22_elastic
#![forbid(unsafe_code)]

mod text;

use std::collections::BTreeMap;
use std::env;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use overdrive::checkpoint::Writers;
use overdrive::dataload::DistributedSampler;
use overdrive::ddp::{Backend, DistributedDataParallel, InitMethod, ReduceOp, init_process_group};
use overdrive::prelude::*;
use overdrive::sched::WarmupCosineLr;
use overdrive_launch::{Launch, helper};

use text::{CONTEXT, Decoder, pieces};

const STEPS: u64 = 90;
const LOST_AT: u64 = 25;
const BACK_AT: u64 = 65;
/// The batch size of all ranks together; it divides by every number of ranks.
const BATCH: usize = 32;

fn main() -> Result<()> {
    helper(); // of the launcher, must come first
    let args: Vec<String> = env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [folder, ..] if env::var_os("RANK").is_some() => train(Path::new(folder)),
        // On a cluster: overdrive-run --nnodes 1:2 --rdzv-endpoint host0:29500 --secret-file FILE ./train FOLDER
        [_, "elastic", node, port] => {
            let launch = Launch::current_program().nnodes(2).min_nodes(1).node_rank(node.parse()?);
            Ok(launch.rdzv_endpoint("127.0.0.1", port.parse()?).insecure().env("OMP_NUM_THREADS", "1").run()?)
        }
        [_, "whole"] => Ok(Launch::current_program().nproc(2).env("OMP_NUM_THREADS", "1").run()?),
        _ => demonstrate(),
    }
}

/// A rank: trains from the last checkpoint to the end, or until it is told that a host has joined.
fn train(folder: &Path) -> Result<()> {
    let group = init_process_group(Backend::Gloo, InitMethod::Auto)?;
    ensure!(BATCH.is_multiple_of(group.size()), "{BATCH} pieces cannot be divided evenly among {} ranks", group.size());
    let sampler = DistributedSampler::shuffled(pieces().len(), group.size(), group.rank(), 7)?;
    let mut loader = DataLoader::builder(pieces()).batch_size(BATCH / group.size()).sampler(sampler).build()?;
    tch::manual_seed(7);
    let mut model = Decoder::new()?;
    let mut opt = AdamW::builder(&model).lr(3e-3).build()?;
    let mut sched = LrScheduler::new(&mut opt, WarmupCosineLr::new(20, STEPS))?;

    let checkpoint = Checkpoint::builder(folder).every(10).on_signal(true);
    let mut checkpoint = checkpoint.ranks(group.clone(), Writers::First).build()?;
    let resumed = checkpoint.resume(&mut [
        ("model", &mut model),
        ("optimizer", &mut opt),
        ("schedule", &mut sched),
        ("data", &mut loader),
    ])?;
    let mut step = resumed.map_or(0, |resumed| resumed.step);
    let ddp = DistributedDataParallel::new(&model, &group)?;
    'training: while step < STEPS {
        for batch in &loader {
            let batch = batch?.to_kind(Kind::Int64);
            let (inputs, targets) = (batch.narrow(1, 0, CONTEXT), batch.narrow(1, 1, CONTEXT));
            let logits = ddp.forward(|| model.forward(&inputs))??;
            let loss = logits.flatten(0, 1).cross_entropy_for_logits(&targets.flatten(0, 1));
            ddp.backward(&loss)?;
            clip_grad_norm_(opt.params(), 1.0)?;
            opt.step()?;
            opt.zero_grad()?;
            sched.step(&mut opt)?;
            step += 1;
            let mut mean = loss.detach();
            group.all_reduce(&mut mean, ReduceOp::Avg)?;
            if group.rank() == 0 {
                println!("step {step} ranks {} loss {}", group.size(), mean.double_value(&[]));
            }
            let mut due = checkpoint.due(step)?;
            // Only so that this short run does not end before the other host is back.
            while step == BACK_AT && group.size() == 1 && !due {
                thread::sleep(Duration::from_millis(20));
                due = checkpoint.due(step)?;
            }
            if due {
                checkpoint
                    .save(step, &[("model", &model), ("optimizer", &opt), ("schedule", &sched), ("data", &loader)])?;
            }
            if checkpoint.stop_requested() || step == STEPS {
                break 'training;
            }
        }
    }
    if group.rank() == 0 && step == STEPS {
        println!("{}", model.write("  Ham. ", 80, Device::Cpu)?);
    }
    Ok(checkpoint.finish()?)
}

/// Loses and regains the second of two launchers, and compares with an undisturbed run.
fn demonstrate() -> Result<()> {
    let (disturbed, whole) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
    let launcher = |node: &str| start(disturbed.path(), &["elastic", node, &port]);
    let (mut first, mut second) = (launcher("0")?, Some(launcher("1")?));
    let mut losses = BTreeMap::new();
    follow(&mut first, |step, ranks, loss| {
        losses.insert(step, loss);
        if (step, ranks) == (LOST_AT, 2)
            && let Some(mut lost) = second.take()
        {
            println!("step {step}: loss {loss:.3} with two ranks; the second host is lost");
            lost.kill()?;
            lost.wait()?;
        } else if (step, ranks) == (BACK_AT, 1) {
            println!("step {step}: loss {loss:.3} with one rank; the second host is back");
            second = Some(launcher("1")?);
        } else if step == STEPS {
            println!("step {step}: loss {loss:.3} with {ranks} ranks");
            ensure!(ranks == 2, "the second host should have joined");
        }
        Ok(())
    })?;
    let ended = second.context("the second host is back")?.wait()?;
    ensure!(ended.success(), "the second launcher ended with {ended}");

    let mut undisturbed = BTreeMap::new();
    follow(&mut start(whole.path(), &["whole"])?, |step, _, loss| {
        undisturbed.insert(step, loss);
        Ok(())
    })?;
    ensure!(losses.len() == STEPS as usize && undisturbed.len() == losses.len(), "every step has a loss");
    let differences = losses.iter().map(|(step, loss)| (loss / undisturbed[step] - 1.0).abs());
    let largest = differences.fold(0.0, f64::max);
    println!("the losses of all {STEPS} steps differ from those of an undisturbed run by {largest:.1e} at most");
    ensure!(largest < 1e-3, "they should be the same, except for rounding");
    Ok(())
}

/// A launcher in a process of its own, so that it can be killed.
fn start(folder: &Path, args: &[&str]) -> Result<Child> {
    let mut launcher = Command::new(env::current_exe()?);
    // The lost rank's peer fails, as it should: its message is enough.
    launcher.arg(folder).args(args).stdout(Stdio::piped()).env_remove("RUST_BACKTRACE");
    Ok(launcher.spawn()?)
}

/// Calls `seen` with each step, number of ranks and loss that rank 0 reports, and prints its other lines, until its
/// launcher ends.
fn follow(launcher: &mut Child, mut seen: impl FnMut(u64, usize, f64) -> Result<()>) -> Result<()> {
    for line in BufReader::new(launcher.stdout.take().context("no output")?).lines() {
        let line = line?;
        match numbers(&line) {
            Some((step, ranks, loss)) => seen(step, ranks, loss)?,
            None => println!("{line}"),
        }
    }
    let ended = launcher.wait()?;
    ensure!(ended.success(), "the first launcher ended with {ended}");
    Ok(())
}

/// Those of `step 7 ranks 2 loss 3.5`, after the prefix that a launcher of several ranks gives each line.
fn numbers(line: &str) -> Option<(u64, usize, f64)> {
    let words: Vec<&str> = line.trim_start_matches("[rank0]: ").split(' ').collect();
    match words[..] {
        ["step", step, "ranks", ranks, "loss", loss] => {
            Some((step.parse().ok()?, ranks.parse().ok()?, loss.parse().ok()?))
        }
        _ => None,
    }
}
