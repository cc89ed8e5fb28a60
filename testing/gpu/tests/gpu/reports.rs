//! What the fake device tells of a test: once, and where in the program it was.

use std::process::Command;

use anyhow::{Result, bail, ensure};
use overdrive::ffi::{CopyStream, empty_pinned};
use overdrive::prelude::*;
use overdrive_fakecuda::Pace;

use crate::turns::checked;
use crate::{FLOAT, fake};

pub fn equal_waits_are_told_once_and_by_the_program() -> Result<()> {
    let (fake, number) = (fake()?, Tensor::ones([1], FLOAT));
    fake.reset();
    fake.trace_waits(true);
    for _ in 0..3 {
        let _ = number.double_value(&[0]);
    }
    let waits = fake.waits();
    let heads: Vec<&str> = waits.lines().filter(|line| !line.starts_with(' ')).collect();
    ensure!(!heads.is_empty() && heads.iter().all(|line| line.starts_with("3 times: ")), "{waits}");
    let second = waits.lines().nth(1).unwrap_or_default();
    ensure!(second.contains("tch::") || second.contains("at::"), "the program comes first: {waits}");
    ensure!(waits.contains("equal_waits_are_told_once_and_by_the_program"), "{waits}");
    ensure!(!waits.contains("libtest_mimic"), "what called the test says nothing: {waits}");
    Ok(())
}

pub fn a_context_is_told_with_what_made_it() -> Result<()> {
    let fake = fake()?;
    let _used = Tensor::ones([1], FLOAT);
    let (origin, nothing) = (fake.context_origin(0), fake.context_origin(99));
    ensure!(origin.lines().any(|line| line.trim_start().starts_with("cuda")), "no function of CUDA: {origin}");
    ensure!(nothing.is_empty(), "there is no device 99: {nothing}");
    Ok(())
}

pub fn a_race_is_told_once() -> Result<()> {
    let fake = fake()?;
    fake.find_races(true);
    fake.reset();
    let (stream, buffer) = (CopyStream::new(0)?, empty_pinned(&[64], Kind::Float)?.fill_(1.0));
    let mut copy = stream.upload(&buffer)?;
    let _ = copy.zero_();
    let _ = copy.zero_();
    let notes = fake.notes();
    fake.reset();
    let with_copy = notes.iter().filter(|note| note.contains("copy") && note.contains("not ordered")).count();
    ensure!(with_copy == 1, "{}", notes.join("; "));
    Ok(())
}

/// A name that is wrong, a device that is not there, and one more call than there are.
pub fn a_failure_that_nothing_meets_fails_its_test() -> Result<()> {
    let fake = fake()?;
    type Plant = fn(overdrive_fakecuda::Fake);
    let plants: [(&str, Plant); 4] = [
        ("\"cudaMaloc\" is no function", |fake| fake.fail("cudaMaloc", 1, 2)),
        ("\"lost:17\" is none of 1 devices", |fake| fake.lose(17, 0)),
        ("\"no such kernel\" has 1 to go until 719", |fake| fake.fail_later("no such kernel", 1, 719)),
        ("\"FillFunctor\" has 1 to go until 1", |fake| fake.fail("FillFunctor", 2, 1)),
    ];
    for (told, plant) in plants {
        let run = checked(|| {
            plant(fake);
            drop(Tensor::zeros([4], FLOAT));
            Ok(())
        });
        let Err(error) = run else { bail!("{told}: the test passed") };
        ensure!(format!("{error:#}").contains(told), "{told}: {error:#}");
    }
    checked(|| Ok(()))
}

/// Also of a test that fails before it could put anything back.
pub fn what_a_test_sets_ends_with_it() -> Result<()> {
    let fake = fake()?;
    let failed = checked(|| {
        fake.set_pace(Pace::Lazy);
        fake.find_races(true);
        fake.trace_waits(true);
        fake.keep_order(true);
        fake.fail("cudaMalloc", 1000, 2);
        ensure!(fake.guard_pinned(true) && fake.limit(0, 1 << 10));
        bail!("it fails")
    });
    ensure!(failed.is_err());
    ensure!(fake.planted().is_empty(), "{:?}", fake.planted());
    fake.reset();
    // Without an order, without a wait, and more than the limit.
    let (stream, mut buffer) = (CopyStream::new(0)?, empty_pinned(&[1 << 20], Kind::Float)?);
    let mut copy = stream.upload(&buffer)?;
    let _ = (buffer.fill_(1.0), copy.zero_(), Tensor::zeros([1 << 24], FLOAT).double_value(&[0]));
    let (notes, waits, issued) = (fake.notes(), fake.waits(), fake.issued());
    ensure!(notes.is_empty() && waits.is_empty() && issued.is_empty(), "{notes:?}, {waits}, {issued:?}");
    Ok(())
}

/// Ranks of a shell that lets programs see one GPU, and allocate as only a real one can.
pub fn variables_of_a_gpu_do_not_reach_the_stand_ins() -> Result<()> {
    fake()?;
    let test = "ranks::without_a_launcher_each_rank_uses_its_own_device";
    let mut program = Command::new(std::env::current_exe()?);
    program.env_remove("LD_PRELOAD").env_remove("FAKECUDA_STARTED");
    program.env("CUDA_VISIBLE_DEVICES", "1").env("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True");
    let output = program.args(["--exact", test]).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success() && text.contains("1 passed"), "{text}");
    Ok(())
}
