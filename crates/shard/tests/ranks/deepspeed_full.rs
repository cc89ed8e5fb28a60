//! Stage 3 from DeepSpeed's JSON beside the same objects built by hand.

use anyhow::{Context, Result, ensure};
use overdrive_amp::Autocast;
use overdrive_core::{Optimizer, Stateful};
use overdrive_ddp::ProcessGroup;
use overdrive_memory::CpuOffloadOptimizer;
use overdrive_optim::AdamW;
use overdrive_shard::deepspeed::{DeepSpeedConfig, DeepSpeedError, TrainingArguments, ZeroStage};
use overdrive_shard::{
    FullyShardedBuilder, FullyShardedDataParallel, FullyShardedOptimizer, OffloadPolicy, ShardedUnit,
};
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;
use crate::model::{same, same_state};
use crate::zero::Build;

const SIZE: i64 = 24;
const STEPS: i64 = 5;
const PARAMS: &str = r#""optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}}"#;

struct Run {
    fsdp: FullyShardedDataParallel,
    opt: FullyShardedOptimizer<Box<dyn Optimizer>>,
    layers: Vec<(Tensor, ShardedUnit)>,
}

impl Run {
    fn new(
        mut builder: FullyShardedBuilder,
        optimizer: impl FnOnce(&FullyShardedDataParallel) -> Result<FullyShardedOptimizer<Box<dyn Optimizer>>>,
    ) -> Result<Self> {
        tch::manual_seed(5);
        let mut layers = Vec::new();
        for number in 0..3 {
            let weight = Tensor::randn([SIZE, SIZE], (Kind::Float, Device::Cpu)).set_requires_grad(true);
            let unit = builder.unit(&format!("layer{number}"), [("weight", &weight)])?;
            layers.push((weight, unit));
        }
        let named = layers.iter().enumerate().map(|(at, (weight, _))| (at.to_string(), weight.shallow_clone()));
        let fsdp = builder.build(named.collect::<Vec<_>>())?;
        let opt = optimizer(&fsdp)?;
        Ok(Self { fsdp, opt, layers })
    }

    fn step(&mut self, number: i64, region: &Autocast, max_norm: Option<f64>) -> Result<()> {
        tch::manual_seed(100 + number);
        let inputs = Tensor::randn([3, SIZE], (Kind::Float, Device::Cpu));
        let loss = region.run(|| {
            let outputs = self.fsdp.try_forward(inputs, |x| {
                self.layers.iter().try_fold(x, |x, (weight, unit)| unit.forward(x, |x| x.matmul(weight).tanh()))
            });
            outputs.map(|it| it.square().mean(Kind::Float))
        })??;
        self.fsdp.backward(&loss)?;
        if let Some(max_norm) = max_norm {
            self.fsdp.clip_grad_norm_(max_norm)?;
        }
        self.opt.step()?;
        self.opt.zero_grad()?;
        Ok(())
    }

    fn rows(&self) -> Vec<(String, Tensor)> {
        self.fsdp.parameters().iter().map(|param| (param.label(0), param.tensor().detach())).collect()
    }
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let folder = tempfile::tempdir()?;
    let path = folder.path().display();
    let adamw: Build = |params| Ok(Box::new(AdamW::builder(params).lr(0.02).weight_decay(0.1).build()?));
    let host: Build = |params| {
        let build = |params| AdamW::builder(params).lr(0.02).weight_decay(0.1).build();
        Ok(Box::new(CpuOffloadOptimizer::new(params, build)?))
    };
    let bf16 = Some(Kind::BFloat16);
    let on_disk = OffloadPolicy::Disk(folder.path().to_owned());
    let nvme = format!(r#", "offload_param": {{"device": "nvme", "nvme_path": "{path}"}}"#);
    for (zero, others, policy, kind, converts, build) in [
        ("", r#", "gradient_clipping": 0.1"#, OffloadPolicy::None, None, false, adamw),
        (
            r#", "stage3_prefetch_bucket_size": 0"#,
            r#", "bf16": {"enabled": true}"#,
            OffloadPolicy::None,
            bf16,
            true,
            adamw,
        ),
        (r#", "offload_optimizer": {"device": "cpu"}"#, "", OffloadPolicy::None, None, false, host),
        (r#", "offload_param": {"device": "cpu"}"#, "", OffloadPolicy::Cpu, None, false, adamw),
        (&nvme, r#", "torch_autocast": {"enabled": true, "dtype": "bfloat16"}"#, on_disk, bf16, false, adamw),
    ] {
        let text = format!(
            r#"{{"train_micro_batch_size_per_gpu": 3, "zero_optimization": {{"stage": 3{zero}}}, {PARAMS}{others}}}"#
        );
        let config = DeepSpeedConfig::from_json(&text, &TrainingArguments::new(group.size()))?;
        ensure!(config.stage() == ZeroStage::Parameters && config.stage().number() == 3);
        let by_hand =
            FullyShardedDataParallel::builder(&group)?.offload_policy(policy).prefetch(!zero.contains("size\": 0"));
        let by_hand = match kind.filter(|_| converts) {
            Some(kind) => by_hand.mixed_precision(kind, Some(Kind::Float)),
            None => by_hand,
        };
        let by_hand = Run::new(by_hand, |model| Ok(model.optimizer(build)?))?;
        is_as_by_hand(&group, &config, by_hand, kind).context(text)?;
    }
    refusals(&group)
}

fn is_as_by_hand(group: &ProcessGroup, config: &DeepSpeedConfig, mut by_hand: Run, kind: Option<Kind>) -> Result<()> {
    let mut told = Run::new(config.fully_sharded(group)?, |model| Ok(config.fully_sharded_optimizer(model)?))?;
    let region = Autocast::new(Device::Cpu);
    let region = kind.map_or(region.enabled(false), |kind| region.kind(kind));
    let begun = told.rows().iter().map(|(name, it)| (name.clone(), it.copy())).collect::<Vec<_>>();
    for step in 0..STEPS {
        told.step(step, &config.autocast(Device::Cpu), config.gradient_clipping())?;
        by_hand.step(step, &region, config.gradient_clipping())?;
        same(&told.rows(), &by_hand.rows()).with_context(|| format!("step {step}"))?;
    }
    ensure!(same(&told.rows(), &begun).is_err(), "nothing was trained");
    ensure!(told.rows().iter().all(|(_, rows)| rows.kind() == Kind::Float), "rows are the master weights");
    same_state(&told.opt.state_dict()?, &by_hand.opt.state_dict()?)
}

fn refusals(group: &ProcessGroup) -> Result<()> {
    let of_stage = |stage: usize| {
        let text =
            format!(r#"{{"train_micro_batch_size_per_gpu": 3, "zero_optimization": {{"stage": {stage}}}, {PARAMS}}}"#);
        DeepSpeedConfig::from_json(&text, &TrainingArguments::new(group.size()))
    };
    let told = of_stage(2)?.fully_sharded(group).err().context("stage 2 was accepted")?;
    ensure!(matches!(told, DeepSpeedError::Stage { found: 2, .. }), "{told:?}");
    let weight = Tensor::ones([2, 2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let told = of_stage(3)?.zero_optimizer([("weight", &weight)], group).err().context("stage 3 was accepted")?;
    ensure!(matches!(told, DeepSpeedError::Stage { found: 3, .. }), "{told:?}");
    let text = format!(r#"{{"train_micro_batch_size_per_gpu": 3, "zero_optimization": {{"stage": 3}}, {PARAMS}}}"#);
    let other = DeepSpeedConfig::from_json(&text, &TrainingArguments::new(group.size() + 1))?;
    let told = other.fully_sharded(group).err().context("another number of ranks was accepted")?;
    ensure!(matches!(told, DeepSpeedError::WorldSize { .. }), "{told:?}");
    Ok(())
}
