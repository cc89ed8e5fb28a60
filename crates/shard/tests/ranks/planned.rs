//! The planner's figures beside runs: what it says of memory is counted, what it chooses runs under a cap.

use anyhow::{Context, Result, ensure};
use overdrive_core::{Optimizer, Parameter};
use overdrive_ddp::{DistributedDataParallel, ProcessGroup};
use overdrive_ffi::host_memory;
use overdrive_memory::account::{Category, Estimate};
use overdrive_memory::{MemoryError, checkpoint};
use overdrive_shard::deepspeed::{DeepSpeedConfig, TrainingArguments, ZeroStage};
use overdrive_shard::planner::{Candidate, Cluster, Place, Plan, Workload};
use overdrive_shard::{ShardError, ShardedUnit};
use tch::nn;
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;

const SIZE: i64 = 256;
const BLOCKS: usize = 20;
/// Elements of a block: two matrices with their biases.
const ELEMENTS: usize = (2 * SIZE * 4 * SIZE + 5 * SIZE) as usize;
const SAMPLES: i64 = 256;
const STEPS: i64 = 3;
/// How far a figure may be from what is counted.
const NEAR: f64 = 0.10;

/// The weight and the bias of a wide and a narrow layer.
struct Block([Tensor; 4]);

impl Block {
    fn new(vs: &nn::VarStore, number: usize) -> Self {
        let path = vs.root() / format!("block{number}");
        let layer = |name: &str, from: i64, to: i64| nn::linear(&path / name, from, to, Default::default());
        let [wide, narrow] = [layer("wide", SIZE, 4 * SIZE), layer("narrow", 4 * SIZE, SIZE)];
        Self([wide.ws, wide.bs.unwrap_or_default(), narrow.ws, narrow.bs.unwrap_or_default()])
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        let [wide, wide_bias, narrow, narrow_bias] = &self.0;
        x.linear(wide, Some(wide_bias)).tanh().linear(narrow, Some(narrow_bias))
    }

    fn recomputed(&self, x: &Tensor) -> Result<Tensor, MemoryError> {
        let own = Self(self.0.each_ref().map(Tensor::shallow_clone));
        checkpoint(move |[x]| Ok::<_, MemoryError>(own.forward(x)), [x])
    }

    fn parameters(&self) -> Vec<Parameter> {
        self.0.iter().map(|it| Parameter::unnamed(it.shallow_clone())).collect()
    }
}

fn inputs(samples: i64) -> Tensor {
    Tensor::randn([samples, SIZE], (Kind::Float, Device::Cpu))
}

/// Bytes of activations of a plain step, as the planner's page says.
fn activations(recomputes: bool) -> Result<f64> {
    let vs = nn::VarStore::new(Device::Cpu);
    let blocks: Vec<Block> = (0..BLOCKS).map(|number| Block::new(&vs, number)).collect();
    let estimate = Estimate::of(Device::Cpu, |samples, recorder| {
        vs.trainable_variables().iter_mut().for_each(Tensor::zero_grad);
        let forward = |x: Tensor, block: &Block| if recomputes { block.recomputed(&x) } else { Ok(block.forward(&x)) };
        let outputs = blocks.iter().try_fold(inputs(samples), forward)?;
        outputs.square().mean(Kind::Float).f_backward().map_err(overdrive_ffi::Error::from)?;
        recorder.tag(Category::Parameter, &vs.trainable_variables())?;
        Ok::<_, MemoryError>(())
    })?;
    Ok(estimate.peak(SAMPLES).of(Category::Activation) as f64)
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let ranks = group.size();
    host_memory::count(usize::MAX)?;
    let folder = tempfile::tempdir()?;
    let workload = Workload::new([ELEMENTS; BLOCKS])
        .largest_parameter((4 * SIZE * SIZE) as usize)
        .activations(activations(false)?, activations(true)?);
    let cluster = |bytes: f64| Cluster::new(ranks, bytes / 0.9, 1e12).disk(1e12, 1e9);
    let plan = Plan::new(&workload, &cluster(1e12))?;
    let mut found = Vec::new();
    for candidate in plan.candidates() {
        let json = to_json(candidate, folder.path());
        let peak = train(&group, &json, candidate.recomputes).with_context(|| candidate.name())?;
        let all = group.all_gather_object(&peak)?;
        let most = *all.iter().max().unwrap_or(&0) as f64;
        found.push((candidate.name(), candidate.device_bytes / most));
    }
    let text: Vec<String> =
        found.iter().map(|(name, share)| format!("{name}: {share:.3} of what was counted")).collect();
    ensure!(found.iter().all(|(_, share)| (share - 1.0).abs() <= NEAR), "\n{}", text.join("\n"));

    // What it chooses for less and less memory runs under a cap.
    let mut chosen_before = Vec::new();
    for share in [1.0, 0.6, 0.4, 0.25, 0.12] {
        let bytes = share * plan.candidates()[0].device_bytes * (1.0 + NEAR);
        let plan = Plan::new(&workload, &cluster(bytes))?;
        let Some(chosen) = plan.chosen() else { continue };
        let allowed = host_memory::stats()?.allocated as f64 + bytes * (1.0 + NEAR);
        host_memory::count(allowed as usize)?;
        let peak = train(&group, &to_json(chosen, folder.path()), chosen.recomputes);
        host_memory::count(usize::MAX)?;
        peak.with_context(|| format!("{} under {bytes:.0} bytes", chosen.name()))?;
        chosen_before.push((chosen.stage, chosen.place, chosen.recomputes));
    }
    chosen_before.dedup();
    ensure!(chosen_before.len() >= 4, "{chosen_before:?}");
    Ok(())
}

fn to_json(candidate: &Candidate, folder: &std::path::Path) -> String {
    let mut json = candidate.to_json();
    if candidate.place == Place::Disk {
        let zero = &mut json["zero_optimization"];
        for section in
            ["offload_optimizer", "offload_param"].into_iter().filter(|it| zero[*it].is_object()).collect::<Vec<_>>()
        {
            zero[section]["nvme_path"] = folder.display().to_string().into();
        }
    }
    json["train_micro_batch_size_per_gpu"] = SAMPLES.into();
    json["optimizer"] = serde_json::json!({"type": "AdamW", "params": {"lr": 1e-3}});
    json.to_string()
}

/// Builds what the file says and trains. The peak of a rank in bytes.
fn train(group: &ProcessGroup, json: &str, recomputes: bool) -> Result<usize> {
    let config = DeepSpeedConfig::from_json(json, &TrainingArguments::new(group.size()))?;
    ensure!(config.activation_checkpoint().is_some() == recomputes);
    host_memory::reset_peak()?;
    let before = host_memory::stats()?.allocated;
    let vs = nn::VarStore::new(Device::Cpu);
    tch::manual_seed(group.rank() as i64);
    let forward = |x: Tensor, block: &Block| -> Result<Tensor, ShardError> {
        match recomputes {
            true => block.recomputed(&x).map_err(|error| {
                ShardError::Torch(overdrive_ffi::Error::from(tch::TchError::Torch(error.to_string())))
            }),
            false => Ok(block.forward(&x)),
        }
    };
    let step = |opt: &mut dyn Optimizer, backward: &dyn Fn() -> Result<()>| -> Result<()> {
        backward()?;
        opt.step()?;
        Ok(opt.zero_grad()?)
    };
    match config.stage() {
        ZeroStage::Parameters => {
            let mut sharding = config.fully_sharded(group)?;
            let mut blocks: Vec<(Block, ShardedUnit)> = Vec::new();
            for number in 0..BLOCKS {
                let block = Block::new(&vs, number);
                let unit = sharding.unit(&format!("block{number}"), block.parameters())?;
                blocks.push((block, unit));
            }
            let model = sharding.build(&vs)?;
            let mut opt = config.fully_sharded_optimizer(&model)?;
            for _ in 0..STEPS {
                step(&mut opt, &|| {
                    let outputs = model.try_forward(inputs(SAMPLES), |x| {
                        blocks.iter().try_fold(x, |x, (block, unit)| unit.try_forward(x, |x| forward(x, block)))
                    })?;
                    Ok(model.backward(&outputs.square().mean(Kind::Float))?)
                })?;
            }
        }
        stage => {
            let blocks: Vec<Block> = (0..BLOCKS).map(|number| Block::new(&vs, number)).collect();
            let loss = || -> Result<Tensor> {
                Ok(blocks.iter().try_fold(inputs(SAMPLES), forward)?.square().mean(Kind::Float))
            };
            if stage == ZeroStage::Gradients {
                let mut opt = config.zero_optimizer(&vs, group)?;
                let sharded = config.sharded_data_parallel(&mut opt)?;
                for _ in 0..STEPS {
                    step(&mut opt, &|| Ok(sharded.backward(&loss()?)?))?;
                }
            } else {
                let ddp = DistributedDataParallel::new(&vs, group)?;
                let mut opt: Box<dyn Optimizer> = match stage {
                    ZeroStage::Disabled => config.optimizer(&vs)?,
                    _ => Box::new(config.zero_optimizer(&vs, group)?),
                };
                for _ in 0..STEPS {
                    step(&mut *opt, &|| Ok(ddp.backward(&ddp.forward(loss)??)?))?;
                }
            }
        }
    }
    Ok((host_memory::stats()?.peak - before) as usize)
}
