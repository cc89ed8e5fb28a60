//! `versus load`: what loading 1 GB costs, beside PyTorch.

use std::cell::RefCell;
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use overdrive::prelude::*;
use overdrive_bench_report::{Machine, Ratio, Target, VersusReport};
use tch::nn::VarStore;

use super::checkpoint::{peer, time, versions};
use super::peer::KEEPS_MEMORY;
use super::turns::{Case, Findings, Turns};
use super::{Options, optim, work_folder};

const PAIRS: u32 = 9;

/// Measures in a process that keeps freed memory, and so do the peers, which inherit its environment.
///
/// A run loads once, into new memory, whose first use may cost more than the loading, the same on both sides. Here loading
/// is repeated, and without these settings one allocator would return the memory each time and the other would keep it.
pub fn measure(options: &Options) -> Result<VersusReport> {
    if std::env::var_os(KEEPS_MEMORY[0].0).is_none() {
        let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
        let error = Command::new(std::env::current_exe()?).args(arguments).envs(KEEPS_MEMORY).exec();
        return Err(error).context("cannot start this program again");
    }
    let folder = work_folder().join("load");
    fs::create_dir_all(&folder)?;
    let measured = in_folder(&optim::gpt2_blocks(), &folder, options);
    // A gigabyte each: nobody wants to find them later.
    fs::remove_dir_all(&folder)?;
    measured
}

fn in_folder(shapes: &[Vec<i64>], folder: &Path, options: &Options) -> Result<VersusReport> {
    let program = peer(shapes, folder, options);
    let versions = versions(&program);
    let mut vs = VarStore::new(Device::Cpu);
    optim::params(&vs, shapes);
    let mut opt = AdamW::builder(vs.trainable_variables()).lr(1e-3).build()?;
    // The first step makes the moments.
    opt.step()?;
    opt.zero_grad()?;
    let saved = folder.join("overdrive");
    let mut checkpoint = Checkpoint::builder(&saved).background(false).build()?;
    checkpoint.save(1, &[("model", &vs), ("optimizer", &opt)])?;
    // The heap grows until it holds what loading needs at once.
    for _ in 0..3 {
        checkpoint.resume(&mut [("model", &mut vs), ("optimizer", &mut opt)])?;
    }
    let run = RefCell::new((checkpoint, &mut vs, &mut opt));
    let mut turns = Turns::default();
    turns.ours("resume", || {
        bring_into_memory(&saved)?;
        let (checkpoint, vs, opt) = &mut *run.borrow_mut();
        time(|| {
            let parts: &mut [(&str, &mut dyn Stateful)] = &mut [("model", &mut **vs), ("optimizer", &mut **opt)];
            ensure!(checkpoint.resume(parts)?.is_some(), "there is no checkpoint to resume");
            Ok(())
        })
    });
    let (load, mapped) = ("torch.load and load_state_dict", "torch.load(mmap=True) and load_state_dict");
    turns.peer(load, &program, |peer| Ok(peer.measure("load", 1)? * 1e3));
    turns.peer(mapped, &program, |peer| Ok(peer.measure("load_mmap", 1)? * 1e3));
    turns.take("load", options.pairs.unwrap_or(PAIRS))?;

    let mut findings = Findings::default();
    let text = "loading 1.02 GB from memory that holds the file, checksums compared";
    let mut row = |peer, target| {
        let case = Case { text, unit: "ms", ratio: Ratio::TimesFasterByTime };
        turns.compare(&mut findings, case, ("resume", peer), target)
    };
    row(load, Some(Target::AtLeast(0.8)))?;
    // It reads the optimizer's state later, when a step needs it, and compares nothing.
    row(mapped, None)?;
    Ok(findings.report(Machine::detect(None), versions))
}

/// Reads all files below a folder, so that loading them compares programs and not what the kernel happens to keep of the
/// disk. The peer does the same.
fn bring_into_memory(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        match path.is_dir() {
            true => bring_into_memory(&path)?,
            false => _ = std::io::copy(&mut File::open(&path)?, &mut std::io::sink())?,
        }
    }
    Ok(())
}
