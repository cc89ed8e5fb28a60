//! How much memory a batch will need, known from small ones; what the memory is used for; and what a step leaves
//! behind.
//!
//! Five models, with the optimizers and techniques that people train them with, run steps with batches of 2 to 8. From
//! these the peak with a batch of 24 is estimated, and then measured. What the estimate knows of a model is only what
//! these steps showed.
//!
//! A folder as argument gets `memory.html`, a profile with what memory is used for over a step, and what would make it fit.
//!
//! Expect: estimates within 10% of what was measured, in under a minute on a CPU.
//!
//!     cargo run -p overdrive-examples --example 18_memory_estimate
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use overdrive::ffi::host_memory;
use overdrive::memory::account::{Category, MemoryForecast, MemoryRecorder};
use overdrive::memory::{Estimate, checkpoint, leak_check};
use overdrive::nn::models::{Gpt2LmHeadModel, Resnet, ResnetBlock};
use overdrive::nn::{Lstm, NnError, TransformerEncoderLayer};
use overdrive::optim::{Adagrad, Lion};
use overdrive::prelude::*;
use overdrive::profile::{Bottleneck, Diagnosis, RunRecorder};
use tch::{Device, Kind, Tensor};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);
const LARGE: i64 = 24;

/// A training step, and the tensors that it began with.
type Step<'s> = Box<dyn FnMut(i64, Option<&MemoryRecorder>) -> Result<()> + 's>;

/// A step of a model with an optimizer: clears gradients, and tags what there is at the end.
fn step<'s, M: Module + 's, O: Optimizer + Stateful + 's>(
    model: M,
    mut opt: O,
    loss: impl Fn(&M, i64) -> Result<Tensor> + 's,
) -> Step<'s> {
    Box::new(move |batch, recorder| {
        loss(&model, batch)?.f_backward()?;
        opt.step()?;
        if let Some(recorder) = recorder {
            recorder.tag_module(&model)?;
            recorder.tag_state(&opt)?;
        }
        opt.zero_grad()?;
        Ok(())
    })
}

fn tokens(batch: i64, length: i64) -> Result<Tensor> {
    Ok(Tensor::f_randint(256, [batch, length], (Kind::Int64, Device::Cpu))?)
}

/// The loss of guessing each token from those before it.
fn next_token(logits: &Tensor, tokens: &Tensor) -> Result<Tensor> {
    let length = tokens.size()[1] - 1;
    let logits = logits.f_narrow(1, 0, length)?.f_flatten(0, 1)?;
    Ok(logits.cross_entropy_for_logits(&tokens.f_narrow(1, 1, length)?.f_flatten(0, 1)?))
}

#[derive(Module)]
struct Encoder {
    layers: nn::ModuleList<Arc<TransformerEncoderLayer>>,
    is_checkpointed: bool,
}

impl Encoder {
    fn new(is_checkpointed: bool) -> Result<Self> {
        let layer = || TransformerEncoderLayer::builder(64, 4).dim_feedforward(256).batch_first(true).build();
        let layers = (0..12).map(|_| layer().map(Arc::new)).collect::<Result<_, NnError>>()?;
        Ok(Self { layers, is_checkpointed })
    }

    fn loss(&self, batch: i64) -> Result<Tensor> {
        let mut x = Tensor::f_randn([batch, 96, 64], FLOAT)?;
        for layer in self.layers.iter() {
            let layer = Arc::clone(layer);
            x = if self.is_checkpointed {
                checkpoint(move |[x]| layer.forward(x), [&x])?
            } else {
                layer.forward(&x)?
            };
        }
        Ok(x.f_square()?.f_mean(Kind::Float)?)
    }
}

#[derive(Module)]
struct Words {
    embedding: nn::Embedding,
    lstm: Lstm,
    head: nn::Linear,
}

fn steps() -> Result<Vec<(&'static str, Step<'static>)>> {
    let resnet = Resnet::builder(ResnetBlock::Basic, [1, 1, 1, 1]).num_classes(10).build()?;
    let sgd = Sgd::builder(&resnet).lr(0.01).momentum(0.9).build()?;
    let resnet = step(resnet, sgd, |model, batch| {
        let images = Tensor::f_randn([batch, 3, 64, 64], FLOAT)?;
        let labels = Tensor::f_randint(10, [batch], (Kind::Int64, Device::Cpu))?;
        Ok(model.forward(&images)?.cross_entropy_for_logits(&labels))
    });
    let gpt = Gpt2LmHeadModel::builder().vocab_size(256).n_positions(128).n_embd(96).n_layer(4).n_head(4).build()?;
    let adamw = AdamW::builder(&gpt).lr(1e-3).build()?;
    let gpt = step(gpt, adamw, |model, batch| {
        let tokens = tokens(batch, 128)?;
        next_token(&model.forward(&tokens)?, &tokens)
    });
    let (plain, checkpointed) = (Encoder::new(false)?, Encoder::new(true)?);
    let (adam, lion) = (AdamW::builder(&plain).lr(1e-3).build()?, Lion::builder(&checkpointed).lr(1e-4).build()?);
    let autocast =
        step(plain, adam, |model, batch| overdrive::amp::autocast(Device::Cpu, Kind::BFloat16, || model.loss(batch))?);
    let checkpointed = step(checkpointed, lion, Encoder::loss);
    let words = Words {
        embedding: nn::Embedding::new(256, 64)?,
        lstm: Lstm::builder(64, 64).num_layers(2).batch_first(true).lstm()?,
        head: nn::Linear::new(64, 256)?,
    };
    let adagrad = Adagrad::builder(&words).lr(1e-2).build()?;
    let words = step(words, adagrad, |model, batch| {
        let tokens = tokens(batch, 35)?;
        let (x, _) = model.lstm.forward(&model.embedding.forward(&tokens)?, None)?;
        next_token(&model.head.forward(&x)?, &tokens)
    });
    Ok(vec![
        ("ResNet, SGD", resnet),
        ("GPT with dropout, AdamW", gpt),
        ("encoder in bfloat16, AdamW", autocast),
        ("checkpointed encoder, Lion", checkpointed),
        ("LSTM, Adagrad", words),
    ])
}

/// A recorded run with this forecast: its page shows what memory is used for, and the diagnosis what would fit.
fn show(step: &mut Step<'_>, forecast: MemoryForecast) -> Result<()> {
    let recorder = RunRecorder::new().profiled_steps(0).memory_forecast(forecast);
    let timer = StepTimer::builder().device(Device::Cpu).warmup_steps(1).record(recorder).build()?;
    for _ in 0..5 {
        step(2, None)?;
        timer.step(2);
    }
    let run = timer.finish()?;
    let diagnosis = Diagnosis::of(&run);
    let full = diagnosis.findings.iter().find(|it| it.bottleneck == Bottleneck::MemoryCapacity);
    println!("{}", full.context("half of the peak is not enough")?);
    if let Some(folder) = std::env::args_os().nth(1).map(PathBuf::from) {
        run.write_html(&diagnosis, folder.join("memory.html"))?;
    }
    Ok(())
}

fn main() -> Result<()> {
    tch::set_num_threads(1);
    host_memory::count(usize::MAX)?;
    manual_seed(1);
    println!("batch of {LARGE:<22} {:>12} {:>12} {:>6} {:>15}", "estimated", "measured", "off", "of activations");
    for (name, mut step) in steps()? {
        let estimate = Estimate::of(Device::Cpu, |batch, recorder| step(batch, Some(recorder)))?;
        let estimated = estimate.peak(LARGE);
        // The models of the other lines are there as well.
        let own = estimated.of(Category::Parameter) + estimated.of(Category::OptimizerState);
        let others = host_memory::stats()?.allocated - own;
        host_memory::reset_peak()?;
        step(LARGE, None)?;
        let measured = host_memory::stats()?.peak - others;
        let off = estimated.total() as f64 / measured as f64 - 1.0;
        let [estimated_mb, measured_mb, activations_mb] =
            [estimated.total(), measured, estimated.of(Category::Activation)].map(|bytes| bytes as f64 / 1e6);
        println!(
            "{name:<31} {estimated_mb:>9.2} MB {measured_mb:>9.2} MB {:>5.1}% {activations_mb:>12.2} MB",
            100.0 * off
        );
        ensure!(off.abs() <= 0.1, "{name}: more than 10% off");
        let fitting = estimate.largest_batch(measured).unwrap_or(0);
        ensure!(
            (LARGE - 3..=LARGE + 3).contains(&fitting),
            "{name}: {fitting} samples should fit into {measured} bytes"
        );
        leak_check(|| step(2, None))?;
        if name.starts_with("GPT") {
            show(&mut step, estimate.forecast(LARGE, Some(estimated.total() / 2)))?;
        }
    }
    let (weight, mut losses) = (Tensor::f_randn([8, 8], FLOAT)?.set_requires_grad(true), Vec::new());
    let keeps = || {
        losses.push(Tensor::f_randn([8, 8], FLOAT)?.f_matmul(&weight)?);
        Ok::<_, anyhow::Error>(())
    };
    let leak = leak_check(keeps).expect_err("each loss keeps its graph");
    println!("no step of these leaves anything behind; one that keeps its losses does:\n{leak}");
    Ok(())
}
