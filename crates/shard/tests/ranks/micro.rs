//! Batches in parts that fit, with sharded optimizers.

use anyhow::{Context, Result, ensure};
use overdrive_core::{GradientSync, IntoParameters, Optimizer, OptimizerError, RankGroup};
use overdrive_ddp::{DistributedDataParallel, OneBitAdam, OneBitAdamOptions, ReduceOp};
use overdrive_ffi::{Error, host_memory};
use overdrive_memory::{AutoMicroBatch, MemoryError};
use overdrive_shard::{ShardedDataParallel, ZeroRedundancyOptimizer};
use tch::{Kind, Tensor};

use crate::harness::Meeting;
use crate::model::{DOUBLE, Model, close, data, large_batch, step_alone};
use crate::zero::sgd;

/// Rank 1 runs out of memory in a backward pass: all ranks begin the batch again with smaller parts, and go on.
pub fn out_of_memory(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let (rank, ranks) = (group.rank(), group.size());
    let (model, alone) = (Model::new(1), Model::new(1));
    let mut opt = ZeroRedundancyOptimizer::new(&model.vs, &group, sgd)?;
    let sharded = ShardedDataParallel::new(&mut opt)?;
    let mut single = sgd((&alone.vs).into_parameters())?;
    let mut micro = AutoMicroBatch::new(4).with_ranks(&sharded, &group);
    for step in 0..3 {
        let batch = data(step, 0, rank);
        let mut fails = step == 1 && rank == 1;
        let loss = |part: &[Tensor]| {
            host_memory::count(usize::MAX)?;
            let loss = model.loss(&(part[0].shallow_clone(), part[1].shallow_clone()));
            if !std::mem::take(&mut fails) {
                return Ok::<_, Error>(loss);
            }
            // Its backward pass needs 512 KiB, and gets at most 64.
            let bias = &model.vs.variables()["layer3.bias"];
            let loss = loss + (bias.sum(Kind::Double) * Tensor::ones([1 << 16], DOUBLE)).square().mean(Kind::Double);
            host_memory::count(host_memory::stats()?.allocated as usize + (64 << 10))?;
            Ok(loss)
        };
        let _mean = micro.backward(&mut opt, &[batch.0, batch.1], loss).with_context(|| format!("step {step}"))?;
        ensure!(micro.size() == if step == 0 { 4 } else { 2 });
        opt.step()?;
        opt.zero_grad()?;
        step_alone(&alone, &mut *single, &large_batch(step, 1, ranks), None)?;
        close(&model.values(), &alone.values()).with_context(|| format!("step {step}"))?;
    }
    Ok(())
}

/// Each rank has another number of samples, in parts that they do not fill.
pub fn uneven(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    {
        let model = Model::new(1);
        let mut opt = ZeroRedundancyOptimizer::new(&model.vs, &group, sgd)?;
        let sharded = ShardedDataParallel::new(&mut opt)?;
        equals(&group, &model, &mut opt, &sharded, &group).context("ZeRO-2")?;
    }
    let model = Model::new(1);
    let mut opt = ZeroRedundancyOptimizer::new(&model.vs, &group, sgd)?;
    let ddp = DistributedDataParallel::new(&model.vs, &group)?;
    equals(&group, &model, &mut opt, &ddp, &group).context("ZeRO-1")?;
    // Another model's parameters, which are not averaged.
    let other = Model::new(1);
    let mut opt = ZeroRedundancyOptimizer::new(&other.vs, &group, sgd)?;
    let told = equals(&group, &other, &mut opt, &ddp, &group).expect_err("local gradients were taken");
    ensure!(told.to_string().contains("is not averaged over the ranks"), "{told:?}");
    drop(ddp);
    // Nobody averages: refused, on all ranks.
    let model = Model::new(1);
    let mut opt = ZeroRedundancyOptimizer::new(&model.vs, &group, sgd)?;
    let refused = |told: Result<()>| {
        let told = told.expect_err("gradients that nobody averages were taken");
        let is_refused = matches!(told.downcast_ref(), Some(MemoryError::Optimizer(OptimizerError::DoesNotFit { .. })));
        ensure!(is_refused && told.to_string().contains("with_ranks(&"), "{told:?}");
        Ok(())
    };
    refused(equals(&group, &model, &mut opt, overdrive_core::SingleProcess, overdrive_core::SingleProcess))?;
    refused(equals(&group, &model, &mut opt, &group, &group))?;
    // Its steps average: the ranks' samples have to be counted.
    let mut opt = OneBitAdam::new(&group, &model.vs, OneBitAdamOptions::default())?;
    refused(equals(&group, &model, &mut opt, overdrive_core::SingleProcess, overdrive_core::SingleProcess))?;
    // Counted, the mean of the ranks' gradients is that of all samples.
    let mut micro = AutoMicroBatch::new(3).with_ranks(&group, &group);
    let samples = |rank: usize| (0..=rank).map(|micro| data(0, micro, rank)).collect::<Vec<_>>();
    let (inputs, targets): (Vec<_>, Vec<_>) = samples(group.rank()).into_iter().unzip();
    let batch = [Tensor::cat(&inputs, 0), Tensor::cat(&targets, 0)];
    let loss = |part: &[Tensor]| Ok::<_, Error>(model.loss(&(part[0].shallow_clone(), part[1].shallow_clone())));
    let _mean = micro.backward(&mut opt, &batch, loss)?;
    let alone = Model::new(1);
    let (inputs, targets): (Vec<_>, Vec<_>) = (0..group.size()).flat_map(samples).unzip();
    alone.loss(&(Tensor::cat(&inputs, 0), Tensor::cat(&targets, 0))).backward();
    for (name, _) in model.values() {
        let [own, expected] = [&model, &alone].map(|model| model.vs.variables()[&name].grad());
        let mut mean = own / group.size() as f64;
        group.all_reduce(&mut mean, ReduceOp::Sum)?;
        close(&[(name.clone(), mean)], &[(name, expected)])?;
    }
    // Its steps do not, and neither does the group.
    let mut opt = sgd((&model.vs).into_parameters())?;
    refused(equals(&group, &model, &mut opt, &group, &group))
}

/// A few steps are those of one process with the batches of all ranks.
fn equals(
    group: &overdrive_ddp::ProcessGroup,
    model: &Model,
    opt: &mut impl Optimizer,
    sync: impl GradientSync,
    ranks: impl RankGroup,
) -> Result<()> {
    let alone = Model::new(1);
    let mut single = sgd((&alone.vs).into_parameters())?;
    let mut micro = AutoMicroBatch::new(3).with_ranks(sync, ranks);
    for step in 0..3 {
        // 4, 8 and 12 samples.
        let of_rank = |rank: usize| {
            let parts: Vec<_> = (0..=rank).map(|micro| data(step, micro, rank)).collect();
            let (inputs, targets): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
            (Tensor::cat(&inputs, 0), Tensor::cat(&targets, 0))
        };
        let (inputs, targets) = of_rank(group.rank());
        let loss = |part: &[Tensor]| Ok::<_, Error>(model.loss(&(part[0].shallow_clone(), part[1].shallow_clone())));
        let _mean = micro.backward(opt, &[inputs, targets], loss)?;
        opt.step()?;
        opt.zero_grad()?;
        let (inputs, targets): (Vec<_>, Vec<_>) = (0..group.size()).map(of_rank).unzip();
        step_alone(&alone, &mut *single, &(Tensor::cat(&inputs, 0), Tensor::cat(&targets, 0)), None)?;
        close(&model.values(), &alone.values()).with_context(|| format!("step {step}"))?;
    }
    Ok(())
}
