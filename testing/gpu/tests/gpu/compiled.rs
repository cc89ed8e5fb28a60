//! Compiled steps as far as they go where nothing compiles for the device: records, and what they are for.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use overdrive::ffi::cuda;
use overdrive::nn::Linear;
use overdrive::prelude::*;
use overdrive_compile as compile;
use serde_json::Value;

use crate::{FLOAT, GPU};

/// Is set for a process that records steps: where packages are, and which Python makes them, is the process's.
const TOLD: &str = "OVERDRIVE_TEST_GPU_RECORDS";

/// Records steps, if this process was started for that.
pub fn main_if_told() -> Option<Result<()>> {
    std::env::var_os(TOLD).map(|_| record())
}

fn record() -> Result<()> {
    let model = Linear::new(8, 4)?;
    model.to(GPU)?;
    let loss = |batch: &[Tensor]| -> compile::LossResult {
        Ok((model.forward(&batch[0])? - &batch[1]).square().mean(Kind::Float))
    };
    let batch = || [Tensor::randn([16, 8], FLOAT), Tensor::randn([16, 4], FLOAT)];
    let mut opt = AdamW::builder(&model).build()?;
    let options = compile::Options { verbose: false, ..compile::Options::default() };
    let mut step = compile::step(&model, loss).options(options.clone());
    for _ in 0..5 {
        let batch = batch();
        let expected = tch::no_grad(|| loss(&batch)).map_err(anyhow::Error::from_boxed)?;
        ensure!(step.run(&mut opt, &batch)?.allclose(&expected, 1e-6, 1e-7, false));
    }
    let why = step.why_eager().context("it was compiled")?;
    ensure!(why.contains("no Python with torch"), "{why}");
    // The gradients of a compiled loss are computed with the scale of the last backward pass, which lies on the device.
    let mut loss_of = compile::loss(&model, loss).options(options);
    for scale in [256.0, 256.0, 512.0, 512.0] {
        let batch = batch();
        let grad = |loss: Tensor| {
            (loss * scale).backward();
            let grad = model.weight.grad().copy();
            model.weight.shallow_clone().zero_grad();
            grad
        };
        let expected = grad(loss(&batch).map_err(anyhow::Error::from_boxed)?);
        ensure!(grad(loss_of.run(&batch)?).allclose(&expected, 1e-5, 1e-6, false), "scale {scale}");
    }
    Ok(())
}

pub fn steps_are_recorded_for_this_device_and_refused_for_another() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut command = Command::new(std::env::current_exe()?);
    command.env(TOLD, "1").env("OVERDRIVE_COMPILE_CACHE", folder.path()).env("OVERDRIVE_PYTHON", "/no/python");
    let output = command.output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let device = format!("GPU 0: {}, capability", cuda::device_name(0)?);
    let mut records = 0;
    for entry in fs::read_dir(folder.path())? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        records += 1;
        let text = fs::read_to_string(&path)?;
        let record: Value = serde_json::from_str(&text)?;
        let machine = record["machine"].as_str().context("a record without a machine")?;
        ensure!(machine.contains(&device), "{machine}");
        let inputs = record["request"]["inputs"].as_array().context("no inputs")?;
        ensure!(!inputs.is_empty() && inputs.iter().all(|input| input["device"] == "cuda:0"), "{inputs:?}");
        fs::write(&path, text.replace(&device, "GPU 0: another one, capability"))?;
    }
    ensure!(records >= 2, "{records} records: a whole step and a loss were recorded");
    let mut refused = Vec::new();
    compile::prepare(folder.path(), |_, prepared| refused.push(prepared.map_err(|error| error.to_string())))?;
    let is_refusal = |result: &Result<_, String>| {
        result.as_ref().is_err_and(|error| error.contains("another kind of processor or GPU"))
    };
    ensure!(refused.len() == records && refused.iter().all(is_refusal), "{refused:?}");
    Ok(())
}
