//! Two ranks train by DeepSpeed's JSON: ZeRO-2 in bfloat16, with the optimizer on the host, accumulation, clipping and a
//! schedule.
//!
//! The program starts itself twice (`spawn`). The file is one that the HF Trainer takes: what is `"auto"` in it stands for
//! the program's arguments. Beside it, the same objects are built by hand.
//!
//! Expect: losses that fall, equal to those by hand to the bit; and a file with 1-bit Adam refused by name, in a few seconds
//! on a CPU.
//!
//!     cargo run -p overdrive-examples --example 20_deepspeed
#![forbid(unsafe_code)]

use anyhow::{Result, ensure};
use overdrive::accum::{Accumulator, Samples};
use overdrive::amp::{GradScaler, autocast};
use overdrive::core::Optimizer;
use overdrive::ddp::{Backend, InitMethod, init_process_group, spawn};
use overdrive::memory::CpuOffloadOptimizer;
use overdrive::optim::AdamW;
use overdrive::sched::{LambdaLr, LrScheduler};
use overdrive::shard::deepspeed::{DeepSpeedConfig, MixedPrecision, TrainingArguments};
use overdrive::shard::{ShardedDataParallel, ZeroRedundancyOptimizer};
use overdrive::tch::nn::{self, Module};
use overdrive::tch::{self, Device, Kind, Tensor};

const DS_CONFIG: &str = r#"{
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 10,
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto",
            "warmup_type": "linear"
        }
    },
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": true},
        "allgather_partitions": true,
        "allgather_bucket_size": 2e8,
        "overlap_comm": true,
        "reduce_scatter": true,
        "reduce_bucket_size": 2e5,
        "contiguous_gradients": true
    },
    "wall_clock_breakdown": false
}"#;
const STEPS: u64 = 40;
const WARMUP: u64 = 5;
const LR: f64 = 3e-3;
const SAMPLES: i64 = 16;
const MICRO_BATCHES: u64 = 2;
const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn main() -> Result<()> {
    Ok(spawn(2, train)?)
}

fn train() -> Result<()> {
    let group = init_process_group(Backend::Gloo, InitMethod::Auto)?;
    let rank = group.rank();
    let arguments = TrainingArguments::new(group.size())
        .per_device_train_batch_size(SAMPLES as u64)
        .gradient_accumulation_steps(MICRO_BATCHES)
        .max_grad_norm(0.5)
        .learning_rate(LR)
        .weight_decay(0.1)
        .warmup_steps(WARMUP)
        .max_steps(STEPS)
        .mixed_precision(MixedPrecision::Bf16)
        .with_trainer_defaults(); // for the rest: betas and eps
    let config = DeepSpeedConfig::from_json(DS_CONFIG, &arguments)?; // or `from_file("ds_config.json", ..)`
    ensure!(config.train_batch_size() == 64, "2 ranks * 2 micro-batches * 16 samples");

    let (vs, model) = mlp(rank as i64);
    let mut opt = config.zero_optimizer(&vs, &group)?;
    let sharded = config.sharded_data_parallel(&mut opt)?;
    let mut sched = config.schedule().map(|schedule| LrScheduler::new(&mut opt, schedule)).transpose()?;
    let mut scaler = config.loss_scaler(Device::Cpu)?;
    let mut accum = Accumulator::new(config.gradient_accumulation_steps())?.with_sync(&sharded);
    let mut by_hand = ByHand::new(&group)?;

    let (mut first, mut last) = (None, f64::NAN);
    for step in 0..STEPS {
        let parts: Vec<_> = (0..MICRO_BATCHES).map(|micro| batch(step, micro, rank)).collect();
        for micro in accum.windows(&parts) {
            let (inputs, targets) = micro.batch;
            let region = config.autocast(Device::Cpu);
            let loss = region.run(|| model.forward(inputs).mse_loss(targets, tch::Reduction::Mean))?;
            accum.backward(&opt, &scaler.scale(&loss)?, Samples(SAMPLES), micro.closes)?;
            last = loss.double_value(&[]);
        }
        if let Some(max_norm) = config.gradient_clipping() {
            scaler.unscale_(&mut opt)?;
            sharded.clip_grad_norm_(max_norm)?;
        }
        let is_stepped = scaler.step(&mut opt)?;
        opt.zero_grad()?;
        if let (true, Some(sched)) = (is_stepped, &mut sched) {
            sched.step(&mut opt)?;
        }

        let expected = by_hand.step(&parts)?;
        ensure!(last == expected, "step {step}: a loss of {last}, by hand {expected}");
        if config.steps_per_print().is_some_and(|every| (step + 1) % every == 0) && rank == 0 {
            println!(
                "step {}: a loss of {last:.5}, by hand {expected:.5}; rate {:.1e}",
                step + 1,
                opt.lr(0).unwrap_or(0.0)
            );
        }
        first.get_or_insert(last);
    }
    let first = first.unwrap_or(f64::NAN);
    ensure!(last < 0.5 * first, "the loss fell from {first} to {last} only");

    let told = DeepSpeedConfig::from_json(&DS_CONFIG.replace("\"AdamW\"", "\"OneBitAdam\""), &arguments);
    let told = told.expect_err("1-bit Adam is not built from a file").to_string();
    ensure!(told.starts_with("`optimizer.type`: \"OneBitAdam\" is refused: "), "{told}");
    if rank == 0 {
        println!("{told}");
    }
    Ok(())
}

/// What the file says, without it.
struct ByHand {
    model: nn::Sequential,
    opt: ZeroRedundancyOptimizer<CpuOffloadOptimizer<AdamW>>,
    sharded: ShardedDataParallel,
    sched: LrScheduler,
    scaler: GradScaler,
}

impl ByHand {
    fn new(group: &overdrive::ddp::ProcessGroup) -> Result<Self> {
        let (vs, model) = mlp(group.rank() as i64);
        let mut opt = ZeroRedundancyOptimizer::new(&vs, group, |params| {
            CpuOffloadOptimizer::new(params, |params| AdamW::builder(params).lr(LR).weight_decay(0.1).build())
        })?;
        let sharded = ShardedDataParallel::with_bucket_bytes(&mut opt, 4 * 200_000)?;
        // DeepSpeed's rate of a step is that of its iteration before it.
        let factor = |step: u64| match step.saturating_sub(1) {
            iteration @ 0..WARMUP => iteration as f64 / WARMUP as f64,
            iteration => STEPS.saturating_sub(iteration) as f64 / (STEPS - WARMUP) as f64,
        };
        let sched = LrScheduler::new(&mut opt, LambdaLr::new(factor))?;
        // Steps whose gradients overflow are skipped, as with `bf16.check_grad_overflow`.
        let scaler = GradScaler::builder(Device::Cpu).init_scale(1.0).build()?;
        Ok(Self { model, opt, sharded, sched, scaler })
    }

    /// The last micro-batch's loss.
    fn step(&mut self, parts: &[(Tensor, Tensor)]) -> Result<f64> {
        let mut accum = Accumulator::new(parts.len())?.with_sync(&self.sharded);
        let mut last = f64::NAN;
        for micro in accum.windows(parts) {
            let (inputs, targets) = micro.batch;
            let model = &self.model;
            let forward = || model.forward(inputs).mse_loss(targets, tch::Reduction::Mean);
            let loss = autocast(Device::Cpu, Kind::BFloat16, forward)?;
            accum.backward(&self.opt, &self.scaler.scale(&loss)?, Samples(SAMPLES), micro.closes)?;
            last = loss.double_value(&[]);
        }
        self.scaler.unscale_(&mut self.opt)?;
        self.sharded.clip_grad_norm_(0.5)?;
        self.scaler.step(&mut self.opt)?;
        self.scaler.update_to(1.0)?;
        self.opt.zero_grad()?;
        self.sched.step(&mut self.opt)?;
        Ok(last)
    }
}

fn mlp(seed: i64) -> (nn::VarStore, nn::Sequential) {
    tch::manual_seed(seed);
    let vs = nn::VarStore::new(Device::Cpu);
    let layer = |name: &str, inputs, outputs| nn::linear(vs.root() / name, inputs, outputs, Default::default());
    let model = nn::seq()
        .add(layer("first", 16, 128))
        .add_fn(|it| it.tanh())
        .add(layer("second", 128, 128))
        .add_fn(|it| it.tanh())
        .add(layer("last", 128, 1));
    (vs, model)
}

/// This rank's part of a micro-batch.
fn batch(step: u64, micro: u64, rank: usize) -> (Tensor, Tensor) {
    tch::manual_seed((1000 + 100 * step + 10 * micro) as i64 + rank as i64);
    let inputs = Tensor::randn([SAMPLES, 16], FLOAT);
    let targets = inputs.narrow(1, 0, 4).sum_dim_intlist(1, true, Kind::Float);
    (inputs, targets)
}
