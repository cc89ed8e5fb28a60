//! A rank that measures on request, together with the other rank.

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use overdrive::prelude::*;
use overdrive_ddp::hooks::{CastCompress, OneBit, PowerSgd, PowerSgdOptions, SharedMemory, TopK};
use overdrive_ddp::{Backend, DistributedDataParallel, InitMethod, ProcessGroup, ReduceOp, init_process_group};
use tch::nn::VarStore;

use super::RANKS;
use super::port::free_port;
use crate::model::{Cnn, Mlp, cross_entropy};
use crate::versus::peer::{KEEPS_MEMORY, Peer};

/// Samples per rank and step.
pub const BATCH: i64 = 32;
/// The widths of the MLP, which has 10.0 million parameters.
const WIDTHS: [i64; 5] = [784, 2048, 2048, 2048, 10];
/// Warm-up steps: until DDP has rebuilt its buckets, optimizers and hooks have their state, and hooks compress.
const WARM_UP: u32 = 4;

/// What is measured without a hook; other names are those of hooks.
const WITHOUT_HOOK: [&str; 5] = ["step", "local", "hidden", "overlap", "sum"];

/// Starts so many ranks. `command` makes the command of a rank from its number and the master's port.
pub fn start(size: usize, command: impl Fn(usize, u16) -> Result<Command>) -> Result<Peer> {
    let port = free_port();
    Peer::start_together(command(0, port)?, (1..size).map(|rank| command(rank, port)).collect::<Result<_>>()?)
}

/// The command that runs this program as a rank, which keeps its memory between steps.
pub fn command(rank: usize, port: u16) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("ddp-rank").envs(KEEPS_MEMORY);
    set_variables(&mut command, (rank, RANKS), port);
    Ok(command)
}

/// Sets the environment variables of a rank, as a launcher does.
pub fn set_variables(command: &mut Command, (rank, size): (usize, usize), port: u16) {
    command
        .env("RANK", rank.to_string())
        .env("LOCAL_RANK", rank.to_string())
        .env("WORLD_SIZE", size.to_string())
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", port.to_string())
        .env("OMP_NUM_THREADS", "1");
}

/// Answers each line `MODEL_WHAT STEPS` with what it measures:
///
/// - `step`, `local` (without communication) or the name of a hook: the seconds of all steps
/// - `sum`: the seconds of as many all-reduces of one number
/// - `overlap`: the seconds per step in which communication and backward overlap
/// - `hidden`: the share of the communication that overlaps
///
/// The model `mlp*8` takes eight times as many samples.
pub fn serve() -> Result<()> {
    tch::set_num_threads(1);
    let group = init_process_group(Backend::Gloo, InitMethod::Auto)?;
    println!("{}", env!("CARGO_PKG_VERSION"));
    // Made by the first request. Each hook has its own model.
    let mut trainings = BTreeMap::new();
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let (name, steps) = line.split_once(' ').context("expected a name and a number")?;
        let (model, what) = name.split_once('_').context("expected a model and what to measure of it")?;
        let (model, times) = model.split_once('*').unwrap_or((model, "1"));
        let samples = BATCH * times.parse::<i64>()?;
        let hook = if WITHOUT_HOOK.contains(&what) { "none" } else { what };
        let key = format!("{model} {hook}");
        if !trainings.contains_key(&key) {
            trainings.insert(key.clone(), Training::new(model, hook, &group)?);
        }
        let training = trainings.get_mut(&key).context("no training")?;
        group.barrier()?;
        let answer = training.measure(what, samples, steps.parse()?)?;
        println!("{answer}");
        std::io::stdout().flush()?;
    }
    Ok(())
}

type Forward = Box<dyn Fn(&Tensor) -> Tensor>;

struct Training {
    forward: Forward,
    /// The shape of one sample.
    shape: Vec<i64>,
    /// Batches by their number of samples.
    batches: BTreeMap<i64, (Tensor, Tensor)>,
    ddp: DistributedDataParallel,
    opt: AdamW,
    number: Tensor,
}

impl Training {
    fn new(model: &str, hook: &str, group: &ProcessGroup) -> Result<Self> {
        let vs = VarStore::new(Device::Cpu);
        let (forward, shape): (Forward, _) = match model {
            "cnn" => {
                let cnn = Cnn::new(&vs.root());
                (Box::new(move |images| cnn.forward(images)), vec![1, 28, 28])
            }
            _ => {
                let mlp = Mlp::new(&vs.root(), &WIDTHS);
                (Box::new(move |inputs| mlp.forward(inputs)), vec![WIDTHS[0]])
            }
        };
        let ddp = DistributedDataParallel::new(&vs, group)?;
        register(hook, &ddp, group)?;
        let opt = AdamW::builder(vs.trainable_variables()).lr(1e-3).build()?;
        let (batches, number) = (BTreeMap::new(), Tensor::from(1.0f32));
        let mut training = Self { forward, shape, batches, ddp, opt, number };
        let batch = training.batch(BATCH);
        (0..WARM_UP).try_for_each(|_| training.step(&batch, false))?;
        Ok(training)
    }

    /// A random batch, the same one each time.
    fn batch(&mut self, samples: i64) -> (Tensor, Tensor) {
        let (inputs, targets) = self.batches.entry(samples).or_insert_with(|| {
            let inputs = Tensor::randn([&[samples], &self.shape[..]].concat(), (Kind::Float, Device::Cpu));
            (inputs, Tensor::randint(10, [samples], (Kind::Int64, Device::Cpu)))
        });
        (inputs.shallow_clone(), targets.shallow_clone())
    }

    fn step(&mut self, (inputs, targets): &(Tensor, Tensor), local: bool) -> Result<()> {
        self.opt.zero_grad()?;
        let _no_sync = local.then(|| self.ddp.no_sync());
        let loss = cross_entropy(&self.ddp.forward(|| (self.forward)(inputs))?, targets);
        self.ddp.backward(&loss)?;
        Ok(self.opt.step()?)
    }

    fn measure(&mut self, what: &str, samples: i64, steps: u32) -> Result<f64> {
        let batch = self.batch(samples);
        if what == "hidden" || what == "overlap" {
            let (communication, overlap) = self.overlap(&batch, steps)?;
            return Ok(if what == "hidden" { overlap / communication } else { overlap / f64::from(steps) });
        }
        let started = Instant::now();
        for _ in 0..steps {
            match what {
                "sum" => self.ddp.group().all_reduce(&mut self.number, ReduceOp::Max)?,
                _ => self.step(&batch, what == "local")?,
            }
        }
        Ok(started.elapsed().as_secs_f64())
    }

    /// Seconds of communication in all steps, and how many of them overlap with backward, as libtorch measures them.
    fn overlap(&mut self, batch: &(Tensor, Tensor), steps: u32) -> Result<(f64, f64)> {
        self.ddp.set_logging_sample_rate(1)?;
        let (mut communication, mut overlap) = (0.0, 0.0);
        for _ in 0..steps {
            self.step(batch, false)?;
            // DDP writes the times of a step at the next forward.
            drop(self.ddp.forward(|| (self.forward)(&batch.0))?);
            let data: BTreeMap<_, _> = self.ddp.logging_data()?.into_iter().collect();
            let time = |key: &str| -> Result<f64> { Ok(data.get(key).with_context(|| key.to_owned())?.parse()?) };
            communication += time("backward_comm_time")? * 1e-9;
            overlap += time("backward_compute_comm_overlap_time")? * 1e-9;
        }
        self.ddp.set_logging_sample_rate(100)?;
        ensure!(communication > 0.0, "libtorch has measured no communication");
        Ok((communication, overlap))
    }
}

/// Registers a hook: PowerSGD with rank 4, top-k with 1% of the elements. These two and 1-bit compress from the third
/// step on.
fn register(hook: &str, ddp: &DistributedDataParallel, group: &ProcessGroup) -> Result<()> {
    let power = PowerSgdOptions { matrix_approximation_rank: 4, start_power_sgd_iter: 2, ..Default::default() };
    match hook {
        "none" => {}
        "float16" => ddp.register_comm_hook(CastCompress::half(group))?,
        "bfloat16" => ddp.register_comm_hook(CastCompress::bfloat16(group))?,
        "PowerSGD" => ddp.register_comm_hook(PowerSgd::new(group, power)?)?,
        "top-k" => ddp.register_comm_hook(TopK::new(group, 0.01, 2)?)?,
        "SharedMemory" => ddp.register_comm_hook(SharedMemory::new(group)?)?,
        "1-bit" => ddp.register_comm_hook(OneBit::new(group, 2))?,
        _ => anyhow::bail!("no hook {hook}"),
    }
    Ok(())
}
