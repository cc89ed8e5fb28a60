//! Runs from DeepSpeed's JSON beside the same objects built by hand.

use anyhow::{Context, Result, ensure};
use overdrive_accum::{Accumulator, Samples};
use overdrive_amp::{Autocast, GradScaler};
use overdrive_core::{Optimizer, OptimizerError, Parameter, Stateful};
use overdrive_ddp::ProcessGroup;
use overdrive_memory::CpuOffloadOptimizer;
use overdrive_optim::{AdamW, Sgd};
use overdrive_sched::{LambdaLr, LrScheduler};
use overdrive_shard::deepspeed::{DeepSpeedConfig, DeepSpeedError, MixedPrecision, TrainingArguments, ZeroStage};
use overdrive_shard::{ShardedDataParallel, ZeroRedundancyOptimizer};
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;
use crate::model::{Model, SAMPLES, data, same, same_state};

const STEPS: usize = 12;
/// The step whose gradients overflow on the last rank.
const OVERFLOW: usize = 5;

type Built = Result<Box<dyn Optimizer>, OptimizerError>;

/// A file, and by hand what it says.
struct Way<'a> {
    name: &'a str,
    json: String,
    build: &'a dyn Fn(Vec<Parameter>) -> Built,
    /// The rate at a step as a factor of the optimizer's.
    factor: Option<fn(u64) -> f64>,
    micro_batches: usize,
    max_norm: Option<f64>,
    bucket: Option<usize>,
    kind: Option<Kind>,
    /// The scale of losses, with which one step is skipped.
    scale: Option<f64>,
}

fn adamw(params: Vec<Parameter>) -> Built {
    Ok(Box::new(AdamW::builder(params).lr(0.02).betas(0.8, 0.95).eps(1e-6).weight_decay(0.1).build()?))
}

/// A warm-up in a line over 3 steps, then a line down to zero at step 10; DeepSpeed's iteration 0 is our step 1.
fn warmup_decay(step: u64) -> f64 {
    match step.saturating_sub(1) {
        iteration @ 0..3 => iteration as f64 / 3.0,
        iteration => ((10.0 - iteration as f64) / 7.0).max(0.0),
    }
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let folder = tempfile::tempdir()?;
    let nvme = folder.path().display();
    let offloaded = |params: Vec<Parameter>| -> Built { Ok(Box::new(CpuOffloadOptimizer::new(params, adamw)?)) };
    let on_disk = |params: Vec<Parameter>| -> Built {
        let built = CpuOffloadOptimizer::new(params, adamw)?.state_on_disk(folder.path());
        Ok(Box::new(built.map_err(|error| OptimizerError::Tch(error.to_string()))?))
    };
    let sgd = |params: Vec<Parameter>| -> Built { Ok(Box::new(Sgd::builder(params).lr(0.05).momentum(0.9).build()?)) };
    let params = r#""optimizer": {"type": "AdamW", "params": {"lr": 0.02, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1}}"#;
    let decay = r#""scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "warmup_type": "linear",
        "warmup_min_lr": 0, "warmup_max_lr": 0.02, "total_num_steps": 10}}"#;
    let way = |name| Way {
        name,
        json: String::new(),
        build: &adamw,
        factor: None,
        micro_batches: 1,
        max_norm: Some(1.0),
        bucket: None,
        kind: None,
        scale: None,
    };
    let ways = [
        Way {
            json: format!(
                r#"{{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.3,
                "zero_optimization": {{"stage": 2, "reduce_bucket_size": 64}}, {params}, {decay}}}"#
            ),
            factor: Some(warmup_decay),
            micro_batches: 2,
            max_norm: Some(0.3),
            bucket: Some(64 * 4),
            ..way("clipped, accumulated, in small buckets, with a schedule")
        },
        Way {
            json: format!(
                r#"{{"train_micro_batch_size_per_gpu": 4, "bf16": {{"enabled": true}}, "zero_optimization": {{"stage": 2,
                "offload_optimizer": {{"device": "cpu"}}}}, {params}}}"#
            ),
            build: &offloaded,
            kind: Some(Kind::BFloat16),
            scale: Some(1.0),
            ..way("bfloat16, on the host")
        },
        Way {
            json: format!(
                r#"{{"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0, "zero_optimization": {{"stage": 2,
                "offload_optimizer": {{"device": "nvme", "nvme_path": "{nvme}"}}}}, {params}}}"#
            ),
            build: &on_disk,
            max_norm: None,
            ..way("on disk, not clipped")
        },
        Way {
            json: r#"{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2},
                "fp16": {"enabled": true, "initial_scale_power": 8, "hysteresis": 1},
                "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}}"#
                .to_owned(),
            build: &sgd,
            kind: Some(Kind::Half),
            scale: Some(256.0),
            ..way("float16 with a loss scale")
        },
    ];
    for way in &ways {
        is_as_by_hand(&group, way).with_context(|| way.name.to_owned())?;
    }
    refusals(&group)
}

/// The model in float32, with this seed.
fn model(seed: i64) -> Model {
    let mut model = Model::new(seed);
    model.vs.float();
    model
}

/// A micro-batch's loss, which overflows on the last rank in one step.
fn loss_of(model: &Model, group: &ProcessGroup, step: usize, micro: usize, overflows: bool) -> Tensor {
    let (inputs, targets) = data(step, micro, group.rank());
    let loss = (model.forward(&inputs.to_kind(Kind::Float)) - targets.to_kind(Kind::Float)).square().mean(Kind::Float);
    if overflows && step == OVERFLOW && group.rank() + 1 == group.size() { loss * f64::INFINITY } else { loss }
}

fn is_as_by_hand(group: &ProcessGroup, way: &Way<'_>) -> Result<()> {
    let seed = 1 + group.rank() as i64;
    let overflows = way.scale.is_some();

    let config = DeepSpeedConfig::from_json(&way.json, &TrainingArguments::new(group.size()))?;
    ensure!(config.stage() == ZeroStage::Gradients && config.train_micro_batch_size_per_gpu() as i64 == SAMPLES);
    ensure!(config.train_batch_size() == way.micro_batches * SAMPLES as usize * group.size());
    let told = model(seed);
    let mut opt = config.zero_optimizer(&told.vs, group)?;
    let sharded = config.sharded_data_parallel(&mut opt)?;
    let mut sched = config.schedule().map(|schedule| LrScheduler::new(&mut opt, schedule)).transpose()?;
    let mut scaler = config.loss_scaler(Device::Cpu)?;
    let mut accum = Accumulator::new(config.gradient_accumulation_steps())?.with_sync(&sharded);

    let by_hand = model(seed);
    let mut hand_opt = ZeroRedundancyOptimizer::new(&by_hand.vs, group, way.build)?;
    let hand_sharded = match way.bucket {
        Some(bytes) => ShardedDataParallel::with_bucket_bytes(&mut hand_opt, bytes)?,
        None => ShardedDataParallel::new(&mut hand_opt)?,
    };
    let schedule = way.factor.map(LambdaLr::new);
    let mut hand_sched = schedule.map(|schedule| LrScheduler::new(&mut hand_opt, schedule)).transpose()?;
    let mut hand_scaler =
        GradScaler::builder(Device::Cpu).enabled(overflows).init_scale(way.scale.unwrap_or(1.0)).build()?;
    let mut hand_accum = Accumulator::new(way.micro_batches)?.with_sync(&hand_sharded);
    let region = Autocast::new(Device::Cpu);
    let region = way.kind.map_or(region.enabled(false), |kind| region.kind(kind));

    let mut skipped = 0;
    for step in 0..STEPS {
        for micro in 0..way.micro_batches {
            let closes = micro + 1 == way.micro_batches;
            let loss = config.autocast(Device::Cpu).run(|| loss_of(&told, group, step, micro, overflows))?;
            accum.backward(&opt, &scaler.scale(&loss)?, Samples(SAMPLES), closes)?;
            let loss = region.run(|| loss_of(&by_hand, group, step, micro, overflows))?;
            hand_accum.backward(&hand_opt, &hand_scaler.scale(&loss)?, Samples(SAMPLES), closes)?;
        }
        ensure!(config.gradient_clipping() == way.max_norm);
        if let Some(max_norm) = config.gradient_clipping() {
            scaler.unscale_(&mut opt)?;
            sharded.clip_grad_norm_(max_norm)?;
        }
        let is_stepped = scaler.step(&mut opt)?;
        opt.zero_grad()?;
        if let (true, Some(sched)) = (is_stepped, &mut sched) {
            sched.step(&mut opt)?;
        }

        if let Some(max_norm) = way.max_norm {
            hand_scaler.unscale_(&mut hand_opt)?;
            hand_sharded.clip_grad_norm_(max_norm)?;
        }
        let hand_is_stepped = !hand_scaler.step(&mut hand_opt)?.skipped()?;
        if overflows {
            // bfloat16's scale stays.
            if way.kind == Some(Kind::BFloat16) { hand_scaler.update_to(1.0)? } else { hand_scaler.update()? }
        }
        hand_opt.zero_grad()?;
        if let (true, Some(sched)) = (hand_is_stepped, &mut hand_sched) {
            sched.step(&mut hand_opt)?;
        }

        let what = || format!("step {step}");
        ensure!(is_stepped == hand_is_stepped && scaler.scale_value()? == hand_scaler.scale_value()?, what());
        ensure!(opt.lr(0) == hand_opt.lr(0), "step {step}: {:?}, not {:?}", opt.lr(0), hand_opt.lr(0));
        same(&told.values(), &by_hand.values()).with_context(what)?;
        skipped += usize::from(!is_stepped);
    }
    ensure!(skipped == usize::from(overflows), "{skipped} steps were skipped");
    same_state(&opt.state_dict()?, &hand_opt.state_dict()?)?;
    let moved = (told.values()[0].1.shallow_clone() - &model(1).values()[0].1).abs().max().double_value(&[]);
    ensure!(moved > 1e-3, "nothing was trained: {moved}");
    Ok(())
}

/// What does not fit the group or the stage is refused on every rank, and nothing is sent.
fn refusals(group: &ProcessGroup) -> Result<()> {
    let model = model(1);
    let read = |stage: u64, ranks: usize| {
        let text = format!(
            r#"{{"train_micro_batch_size_per_gpu": 1, "optimizer": {{"type": "AdamW", "params": {{"lr": "auto"}}}},
            "bf16": {{"enabled": "auto"}}, "zero_optimization": {{"stage": {stage}}}}}"#
        );
        let arguments = TrainingArguments::new(ranks).learning_rate(0.1).mixed_precision(MixedPrecision::No);
        DeepSpeedConfig::from_json(&text, &arguments)
    };
    let told = read(2, group.size() + 1)?.zero_optimizer(&model.vs, group).err().context("another size")?;
    ensure!(matches!(told, DeepSpeedError::WorldSize { .. }), "{told}");
    let told = read(0, group.size())?.zero_optimizer(&model.vs, group).err().context("stage 0")?;
    ensure!(
        told.to_string() == "a `ZeroRedundancyOptimizer` is of ZeRO stage 1 or 2, but `zero_optimization.stage` is 0"
    );
    let first = read(1, group.size())?;
    let mut opt = first.zero_optimizer(&model.vs, group)?;
    ensure!(opt.lr(0) == Some(0.1));
    let told = first.sharded_data_parallel(&mut opt).expect_err("stage 1");
    ensure!(matches!(told, DeepSpeedError::Stage { found: 1, .. }), "{told}");
    Ok(())
}
