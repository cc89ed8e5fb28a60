//! Compiled steps: on a fake device as far as they go where nothing compiles for it, records and what they are for; on a
//! real one beside uncompiled steps.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use overdrive::ffi::{context, cuda};
use overdrive::nn::Linear;
use overdrive::prelude::*;
use overdrive_compile as compile;
use overdrive_fakecuda::{environment, waits};
use serde_json::Value;

use crate::{FLOAT, GPU, fake, ranks};

/// Set for a process that records, compiles or counts steps: the folder of packages and the Python that makes them are
/// settings of a process.
const TOLD: &str = "OVERDRIVE_TEST_GPU_RECORDS";

/// What such a process does.
const RECORD: &str = "record";
const COMPILE: &str = "compile";
const COUNT: &str = "count";

/// Does what this process was started for, if it was.
pub fn main_if_told() -> Option<Result<()>> {
    Some(match std::env::var(TOLD).ok()?.as_str() {
        COMPILE => compile_all(),
        COUNT => count(),
        _ => record(),
    })
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

/// Models whose compiled steps have to equal uncompiled ones: products, normalization, dropout's draws, embeddings,
/// attention.
const MODELS: [&str; 4] = ["mlp", "cnn", "places", "attention"];

/// Tokens and their places. The gradient of a place is a sum over the batch, whose loops are in another order than those of
/// the list of updates.
#[derive(Module)]
struct Places {
    tokens: nn::Embedding,
    places: nn::Embedding,
}

impl Places {
    fn new() -> Result<Self> {
        Ok(Self { tokens: nn::Embedding::new(96, 32)?, places: nn::Embedding::new(16, 32)? })
    }
}

impl nn::Forward for Places {
    fn forward(&self, input: &Tensor) -> Result<Tensor, nn::NnError> {
        let places = Tensor::arange(input.size()[1], (Kind::Int64, input.device()));
        Ok(self.tokens.forward(input)? + self.places.forward(&places)?)
    }
}

fn model(name: &str) -> Result<(nn::Sequential, Tensor, Tensor)> {
    let linear = nn::Linear::new;
    let labels = Tensor::randint(10, [32], (Kind::Int64, GPU));
    Ok(match name {
        "mlp" => {
            let model = sequential![linear(64, 128)?, nn::Relu, nn::Dropout::new(0.2)?, linear(128, 10)?];
            (model, Tensor::randn([32, 64], FLOAT), labels)
        }
        "cnn" => {
            let conv = nn::Conv2d::builder(3, 8, 3).padding(1).bias(false).build()?;
            let last = linear(8 * 8 * 8, 10)?;
            let model =
                sequential![conv, nn::BatchNorm2d::new(8)?, nn::Relu, nn::MaxPool2d::new(2), nn::Flatten::new(), last];
            (model, Tensor::randn([32, 3, 16, 16], FLOAT), labels)
        }
        "places" => {
            let model = sequential![Places::new()?, nn::Flatten::new(), linear(32 * 16, 10)?];
            (model, Tensor::randint(96, [32, 16], (Kind::Int64, GPU)), labels)
        }
        _ => {
            let layer = nn::TransformerEncoderLayer::builder(32, 4).dim_feedforward(64).batch_first(true).build()?;
            let model = sequential![layer, nn::Flatten::new(), linear(32 * 16, 10)?];
            (model, Tensor::randn([32, 16, 32], FLOAT), labels)
        }
    })
}

/// A training step of a model, compiled or not, whose result is the loss on the device; and the model's parameters.
type Step = Box<dyn FnMut() -> Result<Tensor>>;

fn step(name: &str, compiled: bool) -> Result<(Step, Vec<Tensor>)> {
    manual_seed(5);
    let (model, inputs, labels) = model(name)?;
    model.to(GPU)?;
    // For the rest of the process, which is there for this.
    let model: &'static nn::Sequential = Box::leak(Box::new(model));
    let params = model.named_parameters().iter().map(|it| it.tensor().detach()).collect();
    // A decay that moves weights as much as the gradients do; and an epsilon above the rounding errors that are the whole
    // gradient of some, such as the bias of keys.
    let mut opt = AdamW::builder(model).lr(1e-2).weight_decay(1.0).eps(1e-4).build()?;
    let batch = [inputs, labels];
    let loss =
        |batch: &[Tensor]| -> compile::LossResult { Ok(model.forward(&batch[0])?.cross_entropy_for_logits(&batch[1])) };
    if compiled {
        let options = compile::Options { strict: true, ..compile::Options::default() };
        let mut step = compile::step(model, loss).options(options);
        return Ok((Box::new(move || Ok(step.run(&mut opt, &batch)?.detach())), params));
    }
    let step = move || {
        let loss = loss(&batch).map_err(anyhow::Error::from_boxed)?;
        loss.backward();
        opt.step()?;
        opt.zero_grad()?;
        Ok(loss.detach())
    };
    Ok((Box::new(step), params))
}

/// Steps until a compiled one is settled.
const STEPS: usize = 8;

/// Trains some steps. Returns the losses, and how each weight has moved.
fn train(name: &str, compiled: bool) -> Result<(Vec<f64>, Vec<Tensor>)> {
    let (mut step, params) = step(name, compiled)?;
    let before: Vec<Tensor> = params.iter().map(Tensor::copy).collect();
    let losses = (0..STEPS).map(|_| step()).collect::<Result<Vec<_>>>()?;
    let moved = params.iter().zip(&before).map(|(param, before)| param - before).collect();
    Ok((losses.iter().map(|loss| loss.double_value(&[])).collect(), moved))
}

/// How far two trainings are apart: the largest of the shares of a loss, and of a weight's movement.
fn apart(plain: &(Vec<f64>, Vec<Tensor>), compiled: &(Vec<f64>, Vec<Tensor>)) -> f64 {
    let losses = plain.0.iter().zip(&compiled.0).map(|(plain, compiled)| (plain - compiled).abs() / plain.abs());
    let norm = |tensor: &Tensor| tensor.norm().double_value(&[]);
    let moved = plain.1.iter().zip(&compiled.1).map(|(plain, compiled)| norm(&(compiled - plain)) / norm(plain));
    // `f64::max` would leave a NaN out.
    losses.chain(moved).fold(0.0, |most: f64, share| if most.is_nan() || share <= most { most } else { share })
}

/// Those whose launches are counted on a fake device, and how many kernels update their weights, of which they have few.
const COUNTED: [(&str, u64); 3] = [("mlp", 1), ("cnn", 1), ("places", 1)];

/// Prints what a step launches, uncompiled and compiled: all, cuDNN's convolutions, and updates of lists of weights. Fails
/// if one waits for the device.
fn count() -> Result<()> {
    let fake = fake()?;
    for (name, compiled) in COUNTED.iter().flat_map(|(name, _)| [(*name, false), (*name, true)]) {
        let (mut step, _params) = step(name, compiled)?;
        for _ in 0..STEPS {
            drop(step()?);
        }
        fake.reset();
        drop(step()?);
        let counts = fake.counts();
        ensure!(waits(&counts) == 0, "{name}, compiled: {compiled}: {}", fake.waits());
        let of = |part: &str| -> u64 {
            counts.iter().filter(|(kernel, _)| kernel.contains(part)).map(|(_, times)| times).sum()
        };
        let (convolutions, of_lists) = (of("kernel cudnn convolution"), of("triton_for_fused"));
        println!("counted {} {convolutions} {of_lists}", of("launches"));
    }
    Ok(())
}

/// A Python that runs on the stand-ins: the crate starts one without the loader path that they need.
fn python_on_stand_ins(folder: &Path) -> Result<PathBuf> {
    let python = ranks::python().context("no Python with torch")?;
    let on_stand_ins: String =
        environment(1).iter().map(|(name, value)| format!("export {name}='{value}'\n")).collect();
    let script = folder.join("python");
    fs::write(&script, format!("#!/bin/sh\n{on_stand_ins}exec '{}' \"$@\"\n", python.display()))?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o700))?;
    Ok(script)
}

/// Kernels that Inductor makes for a GPU, read as Python, update weights as the formulas say.
pub fn updates_compiled_for_the_device_are_the_formulas() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let formulas = folder.path().join("formulas.py");
    fs::write(&formulas, include_str!("../../../../crates/compile/src/python/formulas.py"))?;
    let mut command = Command::new(python_on_stand_ins(folder.path())?);
    command.args(["-W", "ignore", "-c", include_str!("formulas.py")]).arg(formulas);
    let output = command.env("TORCHINDUCTOR_CACHE_DIR", folder.path().join("cache")).output()?;
    let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    let right = said[0].lines().filter(|line| line.starts_with("right ")).count();
    ensure!(output.status.success() && right == 10, "{}\n{}", said[0], said[1]);
    Ok(())
}

/// Compiled steps call libtorch's C functions, and those of cuDNN among them have numbers too.
pub fn gradients_of_convolutions_that_compiled_code_asks_for_have_numbers() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut command = Command::new(python_on_stand_ins(folder.path())?);
    let output = command.args(["-W", "ignore", "-c", include_str!("shims.py")]).output()?;
    let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    ensure!(output.status.success() && said[0].lines().count() == 3, "{}\n{}", said[0], said[1]);
    Ok(())
}

/// Inductor makes a package for the stand-in's device, and it runs, though nothing computes what its kernels do.
pub fn a_step_compiled_for_the_device_launches_less_and_never_waits() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut command = Command::new(std::env::current_exe()?);
    command.env(TOLD, COUNT).env("OVERDRIVE_COMPILE_CACHE", folder.path());
    command.env("OVERDRIVE_PYTHON", python_on_stand_ins(folder.path())?);
    let output = command.output()?;
    let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    ensure!(output.status.success(), "{}\n{}", said[0], said[1]);
    let numbers = |line: &str| line.strip_prefix("counted ")?.split(' ').map(|it| it.parse().ok()).collect();
    let counts: Vec<Vec<u64>> = said[0].lines().filter_map(numbers).collect();
    ensure!(counts.len() == 2 * COUNTED.len() && counts.iter().all(|counts| counts.len() == 3), "{}", said[0]);
    for ((name, updates), counts) in COUNTED.iter().zip(counts.chunks(2)) {
        let (plain, compiled) = (&counts[0], &counts[1]);
        ensure!(
            0 < compiled[0] && compiled[0] < plain[0],
            "{name}: {} launches compiled, {} not",
            compiled[0],
            plain[0]
        );
        ensure!(compiled[1] == plain[1], "{name}: {} convolutions compiled, {} not", compiled[1], plain[1]);
        ensure!(compiled[2] == *updates, "{name}: {} kernels update the weights", compiled[2]);
    }
    Ok(())
}

fn compile_all() -> Result<()> {
    // Both sides multiply in float32: convolutions are in TF32 unless told otherwise.
    context::set_cudnn_allow_tf32(false)?;
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
                let apart = apart(&plain, &compiled);
                println!("{apart:e} apart");
                let is_near = apart <= 1e-3;
                if !is_near {
                    failures.push(format!("{name}: {apart:e} apart; losses {:?} and {:?}", plain.0, compiled.0));
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
