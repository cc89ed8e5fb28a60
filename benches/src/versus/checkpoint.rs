//! `versus checkpoint`: the time to save and load 1 GB, against a copy in memory, a plain file write and PyTorch.

use std::cell::RefCell;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use anyhow::Result;
use overdrive::core::Entry;
use overdrive::ffi::HostBuffer;
use overdrive::prelude::*;
use overdrive_bench_report::{Machine, Ratio, Target, Versions, VersusReport};
use tch::nn::VarStore;

use super::turns::{Case, Findings, Program, Turns};
use super::{Options, optim, work_folder};

const PAIRS: u32 = 9;

pub fn measure(options: &Options) -> Result<VersusReport> {
    let shapes = optim::gpt2_blocks();
    // In the work folder, which is usually on a disk; /tmp may be in memory.
    let folder = work_folder().join("checkpoint");
    fs::create_dir_all(&folder)?;
    let measured = in_folder(&shapes, &folder, options);
    // The files take 1 GB each, so remove them even if measuring failed.
    fs::remove_dir_all(&folder)?;
    measured
}

fn in_folder(shapes: &[Vec<i64>], folder: &Path, options: &Options) -> Result<VersusReport> {
    let program = peer(shapes, folder, options);
    let versions = versions(&program);
    let vs = VarStore::new(Device::Cpu);
    optim::params(&vs, shapes);
    let mut opt = AdamW::builder(vs.trainable_variables()).lr(1e-3).build()?;
    // The first step creates AdamW's moments.
    opt.step()?;
    opt.zero_grad()?;
    let tensors = tensors(&[&vs, &opt])?;
    let copies: Vec<Tensor> = tensors.iter().map(Tensor::zeros_like).collect();
    let bytes = tensors.iter().map(|tensor| tensor.numel() * tensor.kind().elt_size_in_bytes()).sum();
    let mut plain = HostBuffer::zeroed(bytes, false)?;
    let mut at = 0;
    for tensor in &tensors {
        plain.copy_from(at, tensor)?;
        at += tensor.numel() * tensor.kind().elt_size_in_bytes();
    }

    let background = RefCell::new(Checkpoint::builder(folder.join("background")).keep(1).build()?);
    let blocking = RefCell::new(Checkpoint::builder(folder.join("blocking")).keep(1).background(false).build()?);
    let run = (&vs, &opt);
    let mut turns = Turns::default();
    turns.ours("copy", || {
        time(|| {
            for (mut to, from) in copies.iter().map(Tensor::shallow_clone).zip(&tensors) {
                to.f_copy_(from)?;
            }
            Ok(())
        })
    });
    turns.ours("background", || {
        let mut checkpoint = background.borrow_mut();
        let stall = time(|| Ok(checkpoint.save(1, &[("model", &*run.0), ("optimizer", &*run.1)])?))?;
        checkpoint.wait()?;
        Ok(stall)
    });
    turns.ours("first", || {
        let mut checkpoint = Checkpoint::builder(folder.join("first")).keep(1).build()?;
        let stall = time(|| Ok(checkpoint.save(1, &[("model", &*run.0), ("optimizer", &*run.1)])?))?;
        checkpoint.finish()?;
        Ok(stall)
    });
    turns.ours("plain", || {
        let (aside, path) = (folder.join("plain.aside"), folder.join("plain"));
        time(|| {
            let mut file = File::create(&aside)?;
            file.write_all(plain.as_slice())?;
            file.sync_all()?;
            Ok(fs::rename(&aside, &path)?)
        })
    });
    turns.ours("blocking", || {
        time(|| Ok(blocking.borrow_mut().save(1, &[("model", &*run.0), ("optimizer", &*run.1)])?))
    });
    turns.peer("torch.save and fsync", &program, |peer| Ok(peer.measure("save", 1)? * 1e3));
    turns.peer("DCP's async_save", &program, |peer| Ok(peer.measure("async_save", 1)? * 1e3));
    turns.take("checkpoint", options.pairs.unwrap_or(PAIRS))?;

    let of = format!("{:.2} GB, {} tensors", bytes as f64 / 1e9, tensors.len());
    let mut findings = Findings::default();
    let mut row = |what: &str, ratio, ours, peer, target| {
        let text = format!("{what}, {of}");
        turns.compare(&mut findings, Case { text: &text, unit: "ms", ratio }, (ours, peer), target)
    };
    let (cost, faster) = (Ratio::ShareOfCost, Ratio::TimesFasterByTime);
    row("what a save in the background stalls", cost, "background", "copy", Some(Target::AtMost(1.3)))?;
    row("the same, the first save", cost, "first", "copy", None)?;
    row("a save that is waited for, with checksums", faster, "blocking", "plain", Some(Target::AtLeast(0.8)))?;
    row("a save that is waited for", faster, "blocking", "torch.save and fsync", None)?;
    row("what a save in the background stalls", cost, "background", "torch.save and fsync", None)?;
    row("what a save in the background stalls", cost, "background", "DCP's async_save", Some(Target::AtMost(1.0)))?;
    Ok(findings.report(Machine::detect(None), versions))
}

/// PyTorch's side, which saves and loads a model and an optimizer of these shapes in a folder.
pub fn peer(shapes: &[Vec<i64>], folder: &Path, options: &Options) -> Program {
    let arguments = serde_json::json!({ "shapes": shapes, "path": folder.join("torch.pt") });
    Program::start(&options.python, include_str!("../../peers/checkpoint.py"), &arguments, "see `cargo xtask setup`")
}

pub fn versions(program: &Program) -> Versions {
    let ours = [("overdrive", env!("CARGO_PKG_VERSION")), ("tch", "0.24.0"), ("libtorch", "2.11.0")];
    let mut versions: Versions = ours.map(|(name, version)| (name.to_owned(), version.to_owned())).into();
    if let Some(version) = program.version() {
        versions.insert("torch (Python)".to_owned(), version);
    }
    versions
}

/// All tensors in the state dicts of `parts`.
fn tensors(parts: &[&dyn Stateful]) -> Result<Vec<Tensor>> {
    let mut tensors = Vec::new();
    for part in parts {
        for (_, entry) in part.state_dict()?.iter() {
            if let Entry::Tensor(tensor) = entry {
                tensors.push(tensor.detach());
            }
        }
    }
    Ok(tensors)
}

/// The time that `work` takes, in milliseconds.
pub fn time(mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    let started = Instant::now();
    work()?;
    Ok(started.elapsed().as_secs_f64() * 1e3)
}
