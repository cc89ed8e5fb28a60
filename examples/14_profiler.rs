//! Where the time of a training step is spent: libtorch's profiler over a few steps of a run.
//!
//! Six steps are skipped, one is waited for, one warms the profiler up, and four are recorded. The program marks its
//! own scopes, and spans of the loader's threads are added through `tracing`.
//!
//! Expect: PyTorch's table of operators, the most expensive first; the scopes' shares of a step; a trace for Perfetto
//! (<https://ui.perfetto.dev>) and TensorBoard, with a track for each thread; nothing recorded outside of the four
//! steps.
//!
//!     cargo run -p overdrive-examples --example 14_profiler -- [FOLDER FOR THE TRACE]
#![forbid(unsafe_code)]

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use overdrive::prelude::*;
use overdrive::profile::{Schedule, SortBy, SpanLayer, TableOptions, tensorboard_trace_handler};
use tracing_subscriber::layer::SubscriberExt as _;

const CPU: Device = Device::Cpu;
const RECORDED: u64 = 4;

fn main() -> Result<()> {
    // Spans of the program and of these crates become scopes while a profiler is on.
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(SpanLayer::new()))?;
    let temporary = tempfile::tempdir()?;
    let traces = std::env::args_os().nth(1).map_or_else(|| temporary.path().to_owned(), PathBuf::from);

    tch::manual_seed(1);
    let model = sequential![nn::Linear::new(64, 512)?, nn::Relu, nn::Linear::new(512, 10)?];
    let mut opt = AdamW::builder(&model).lr(1e-3).build()?;
    let inputs = Tensor::randn([1600, 64], (Kind::Float, CPU));
    let targets = Tensor::randint(10, [1600], (Kind::Int64, CPU));
    let loader = TensorDataset::new((inputs, targets))?.loader().batch_size(64).num_workers(1).build()?;

    let mut profiler = Profiler::builder()
        .schedule(Schedule::new(1, 1, RECORDED)?.skip_first(6).repeat(1))
        .record_shapes(true)
        .with_flops(true)
        .on_trace_ready(tensorboard_trace_handler(&traces))
        .start()?;
    for batch in &loader {
        let (inputs, targets) = batch?;
        let loss = {
            let _scope = record_function("forward");
            model.forward(&inputs)?.cross_entropy_for_logits(&targets)
        };
        {
            let _scope = record_function("backward");
            loss.backward();
        }
        {
            let _scope = record_function("optimizer");
            opt.step()?;
            opt.zero_grad()?;
        }
        profiler.step()?;
    }
    profiler.stop()?;

    let profile = profiler.profile().context("four steps were recorded")?;
    println!("{}", profile.table(&TableOptions::sorted_by(SortBy::SelfCpuTimeTotal).row_limit(8))?);
    let averages = profile.key_averages(false)?;
    let of = |name: &str| averages.get(name).with_context(|| format!("no {name} was recorded"));
    let steps = of("ProfilerStep*")?;
    for name in ["forward", "backward", "optimizer"] {
        let scope = of(name)?;
        ensure!(scope.count == RECORDED, "{name} was recorded {} times", scope.count);
        println!(
            "{name:<10} {:>5.1}% of a step",
            100.0 * scope.cpu_time_total_ns as f64 / steps.cpu_time_total_ns as f64
        );
    }
    ensure!(profile.steps() == (8..=11) && steps.count == RECORDED, "{:?}", profile.steps());
    // 2 m n k for the forward pass of two layers.
    let flops = 2 * 64 * (64 * 512 + 512 * 10) * RECORDED;
    ensure!(of("aten::addmm")?.flops == flops, "{} FLOPs instead of {flops}", of("aten::addmm")?.flops);

    let files: Vec<_> = std::fs::read_dir(&traces)?.collect::<Result<_, _>>()?;
    ensure!(!files.is_empty(), "no trace in {}", traces.display());
    println!("trace: {} kB", files[0].metadata()?.len() / 1000);
    Ok(())
}
