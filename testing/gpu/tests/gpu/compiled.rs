//! Compiled steps: on a fake device as far as they go where nothing compiles for it, records and what they are for; on a
//! real one beside uncompiled steps.

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

/// What such a process does.
const RECORD: &str = "record";
const COMPILE: &str = "compile";

/// Records or compiles steps, if this process was started for that.
pub fn main_if_told() -> Option<Result<()>> {
    std::env::var(TOLD).ok().map(|what| if what == COMPILE { compile_all() } else { record() })
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
    command.env(TOLD, RECORD).env("OVERDRIVE_COMPILE_CACHE", folder.path()).env("OVERDRIVE_PYTHON", "/no/python");
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

/// Models whose compiled steps have to equal uncompiled ones: products, normalization, dropout's draws, attention.
const MODELS: [&str; 3] = ["mlp", "cnn", "attention"];

fn model(name: &str) -> Result<(nn::Sequential, Tensor, Tensor)> {
    let linear = nn::Linear::new;
    let labels = Tensor::randint(10, [32], (Kind::Int64, GPU));
    Ok(match name {
        "mlp" => {
            let model = sequential![linear(64, 128)?, nn::Relu, nn::Dropout::new(0.2)?, linear(128, 10)?];
            (model, Tensor::randn([32, 64], FLOAT), labels)
        }
        "cnn" => {
            let conv = nn::Conv2d::builder(3, 8, 3).padding(1).build()?;
            let last = linear(8 * 8 * 8, 10)?;
            let model =
                sequential![conv, nn::BatchNorm2d::new(8)?, nn::Relu, nn::MaxPool2d::new(2), nn::Flatten::new(), last];
            (model, Tensor::randn([32, 3, 16, 16], FLOAT), labels)
        }
        _ => {
            let layer = nn::TransformerEncoderLayer::builder(32, 4).dim_feedforward(64).batch_first(true).build()?;
            let model = sequential![layer, nn::Flatten::new(), linear(32 * 16, 10)?];
            (model, Tensor::randn([32, 16, 32], FLOAT), labels)
        }
    })
}

/// Trains some steps. Returns the losses, and then the parameters' sums.
fn train(name: &str, compiled: bool) -> Result<Vec<f64>> {
    manual_seed(5);
    let (model, inputs, labels) = model(name)?;
    model.to(GPU)?;
    let mut opt = AdamW::builder(&model).lr(1e-3).build()?;
    let batch = [inputs, labels];
    let loss =
        |batch: &[Tensor]| -> compile::LossResult { Ok(model.forward(&batch[0])?.cross_entropy_for_logits(&batch[1])) };
    let mut losses = Vec::new();
    if compiled {
        let options = compile::Options { strict: true, ..compile::Options::default() };
        let mut step = compile::step(&model, loss).options(options);
        for _ in 0..8 {
            losses.push(step.run(&mut opt, &batch)?.detach());
        }
        ensure!(step.why_eager().is_none(), "{name} ran uncompiled: {:?}", step.why_eager());
    } else {
        for _ in 0..8 {
            let loss = loss(&batch).map_err(anyhow::Error::from_boxed)?;
            loss.backward();
            opt.step()?;
            opt.zero_grad()?;
            losses.push(loss.detach());
        }
    }
    let params = model.named_parameters();
    let sums = params.iter().map(|it| it.tensor().detach().abs().sum(Kind::Double));
    Ok(losses.iter().map(Tensor::shallow_clone).chain(sums).map(|it| it.double_value(&[])).collect())
}

fn compile_all() -> Result<()> {
    let mut failures = Vec::new();
    for name in MODELS {
        println!("\n{name}");
        let begun = std::time::Instant::now();
        let compared = train(name, false).and_then(|plain| Ok((plain, train(name, true)?)));
        println!("took {:.1} s", begun.elapsed().as_secs_f64());
        match compared {
            Err(error) => {
                println!("{error:#}");
                failures.push(format!("{name}: {error:#}"));
            }
            Ok((plain, compiled)) => {
                let far = |(plain, compiled): (&f64, &f64)| (plain - compiled).abs() > 1e-4 * plain.abs().max(1.0);
                if plain.iter().zip(&compiled).any(far) {
                    failures.push(format!("{name}: {plain:?} uncompiled, {compiled:?} compiled"));
                }
            }
        }
    }
    ensure!(failures.is_empty(), "{}", failures.join("\n"));
    Ok(())
}

pub fn steps_compiled_for_the_device_equal_uncompiled_ones() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut command = Command::new(std::env::current_exe()?);
    // It takes minutes, so what it says is shown at once.
    let status = command.env(TOLD, COMPILE).env("OVERDRIVE_COMPILE_CACHE", folder.path()).status()?;
    ensure!(status.success(), "see above");
    Ok(())
}
