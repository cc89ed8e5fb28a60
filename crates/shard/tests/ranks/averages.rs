//! Averages of weights beside those of one process: of rows that ranks have, and of whole parameters.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use overdrive_checkpoint::{CheckpointError, consolidate};
use overdrive_core::{IntoParameters, Optimizer, Parameter, Stateful};
use overdrive_ddp::{DistributedDataParallel, ProcessGroup};
use overdrive_ffi::host_memory;
use overdrive_optim::{AveragedModel, Averaging};
use overdrive_shard::{
    DeviceMesh, FullyShardedDataParallel, OffloadPolicy, ShardError, ShardedDataParallel, ZeroRedundancyOptimizer,
};
use tch::{Kind, Tensor};

use crate::full::{Opt, Sharded, rows_of};
use crate::full_failures::is_of_rank_1;
use crate::harness::{Meeting, all_through, free_port, start};
use crate::model::{DOUBLE, Model, close, data, large_batch, same, step_alone, tensors};
use crate::resharded::{FOLDER, checkpoint, folder};
use crate::zero::adamw;

const STEPS: usize = 12;
const EMA: Averaging = Averaging::Ema { decay: 0.9 };

type Named = Vec<(String, Tensor)>;

/// The averages of parameters that have elements, by name.
fn averages(of: &AveragedModel) -> Result<Named> {
    let named = |it: Parameter| (it.name().unwrap_or_default().to_owned(), it.tensor().copy());
    Ok(of.averages()?.into_iter().map(named).filter(|(_, it)| it.numel() > 0).collect())
}

fn rows(sharded: &Sharded) -> Named {
    sharded.fsdp.parameters().iter().map(|it| (it.label(0), it.tensor().detach().copy())).collect()
}

fn outputs(sharded: &Sharded, inputs: &Tensor) -> Result<Named> {
    Ok(vec![("outputs".to_owned(), tch::no_grad(|| sharded.forward(inputs))?)])
}

fn outputs_alone(model: &Model, inputs: &Tensor) -> Named {
    vec![("outputs".to_owned(), tch::no_grad(|| model.forward(inputs)))]
}

pub fn full(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let folder = tempfile::tempdir()?;
    let disk = OffloadPolicy::Disk(folder.path().to_owned());
    for (units, reshards, averaging, offload) in [
        (&[1, 2][..], true, EMA, OffloadPolicy::None),
        (&[0, 1, 2, 3], true, EMA, OffloadPolicy::None),
        (&[0, 1, 2, 3], false, Averaging::Swa, OffloadPolicy::None),
        (&[1, 2], true, EMA, OffloadPolicy::Cpu),
        (&[1, 2], true, EMA, disk),
    ] {
        let what = format!("{averaging:?}, units {units:?}, freed after forward: {reshards}, {offload:?}");
        let sharded =
            Sharded::with(&group, 1, units, |builder| builder.reshard_after_forward(reshards).offload_policy(offload))?;
        averages_rows(&group, &sharded, averaging).context(what)?;
    }
    Ok(())
}

/// A rank's averages are its rows of those of one process, and units are gathered of them while they are applied.
fn averages_rows(group: &ProcessGroup, sharded: &Sharded, averaging: Averaging) -> Result<()> {
    let (rank, ranks, alone) = (group.rank(), group.size(), Model::new(1));
    let mut opt: Opt = sharded.fsdp.optimizer(adamw)?;
    let mut single = adamw((&alone.vs).into_parameters())?;
    let mut found = AveragedModel::builder(&sharded.fsdp, averaging).warm_up(true).build()?;
    let mut expected = AveragedModel::builder(&alone.vs, averaging).warm_up(true).build()?;
    for step in 0..STEPS {
        sharded.fsdp.backward(&sharded.loss(&data(step, 0, rank))?)?;
        opt.step()?;
        opt.zero_grad()?;
        step_alone(&alone, &mut *single, &large_batch(step, 1, ranks), None)?;
        let sent = sharded.fsdp.exchanges();
        found.update()?;
        ensure!(sharded.fsdp.exchanges() == sent, "an update exchanges nothing");
        expected.update()?;
        close(&averages(&found)?, &rows_of((rank, ranks), &averages(&expected)?))?;
        if step % 4 == 3 {
            let before = rows(sharded);
            let inputs = data(step, 1, rank).0;
            let plain = outputs_alone(&alone, &inputs);
            let averaged = expected.apply(|| outputs_alone(&alone, &inputs))?;
            ensure!(close(&plain, &averaged).is_err(), "the averages are others");
            // The first unit is gathered ahead after each.
            for _ in 0..2 {
                close(&outputs(sharded, &inputs)?, &plain).context("before")?;
            }
            found.apply(|| {
                close(&outputs(sharded, &inputs)?, &averaged)?;
                close(&outputs(sharded, &inputs)?, &averaged)
            })??;
            close(&outputs(sharded, &inputs)?, &plain).context("after")?;
            same(&rows(sharded), &before)?;
        }
        sharded.close_to(&alone).with_context(|| format!("step {step}"))?;
    }
    // Whole averages, under the model's names.
    let whole = found.apply(|| sharded.fsdp.consolidate_state_dict(0))??;
    ensure!(whole.is_some() == (rank == 0));
    if let Some(whole) = whole {
        close(&tensors(&whole), &averages(&expected)?)?;
    }
    // A backward pass would use other values than its forward, on one rank alone too.
    for is_everywhere in [true, false] {
        let loss = sharded.loss(&data(0, 0, rank))?;
        if is_everywhere || rank == 0 {
            found.apply(|| ())?;
        }
        let told = sharded.fsdp.backward(&loss).err().context("a pass over other values")?;
        ensure!(told.to_string().contains("its rows were changed after the forward"), "{told}");
        opt.zero_grad()?;
    }
    // What was gathered ahead or kept has the old values.
    let inputs = data(STEPS, 0, rank).0;
    outputs(sharded, &inputs)?;
    found.copy_to_model()?;
    expected.copy_to_model()?;
    sharded.close_to(&alone).context("copied")?;
    close(&outputs(sharded, &inputs)?, &outputs_alone(&alone, &inputs)).context("copied")?;
    let told = AveragedModel::new(&sharded.model.vs, EMA).map(drop).err().context("whole parameters")?;
    ensure!(told.to_string().contains("`layer0.bias`: its values are sharded over the ranks"), "{told}");
    Ok(())
}

/// Memory runs out on rank 1 while averages are made, while the model gets them, or gives them back: an error there, and one of rank
/// 1 at the next exchange of the others. Then all go on.
pub fn out_of_memory(meeting: &Meeting) -> Result<()> {
    const SIZE: i64 = 64;
    let group = meeting.group()?;
    let fails = group.rank() == 1;
    host_memory::count(usize::MAX)?;
    let mut builder = FullyShardedDataParallel::builder(&group)?;
    let [first, second] = [1.0, 2.0].map(|value| (Tensor::ones([SIZE, SIZE], DOUBLE) * value).set_requires_grad(true));
    let unit = builder.unit("unit", [("first", &first), ("second", &second)])?;
    let fsdp = builder.build([("first", &first), ("second", &second)])?;
    let forward = || {
        let outputs =
            tch::no_grad(|| unit.forward(Tensor::ones([1, SIZE], DOUBLE), |x| x.matmul(&first).matmul(&second)))?;
        Ok::<f64, ShardError>(outputs.mean(Kind::Double).double_value(&[]))
    };
    // Less than a rank's rows of a parameter.
    let rows = (SIZE * SIZE * 8) as usize / group.size();
    let limit = || host_memory::count(host_memory::stats()?.allocated as usize + rows / 2);
    let none = || host_memory::count(usize::MAX);

    let averaged = (2 * SIZE * SIZE) as f64;
    ensure!(forward()? == averaged);
    if fails {
        limit()?;
    }
    let told = AveragedModel::new(&fsdp, EMA).map(drop);
    none()?;
    match (fails, told) {
        (true, Err(error)) => ensure!(error.to_string().contains("out of memory"), "{error}"),
        (false, Ok(())) => is_of_rank_1(&forward().map(drop), "making the averages of weights: ")?,
        (_, told) => anyhow::bail!("{told:?}"),
    }
    let mut ema = AveragedModel::new(&fsdp, EMA)?;
    ema.update()?;
    ensure!(forward()? == averaged);
    for rows in fsdp.parameters() {
        let mut rows = rows.tensor().shallow_clone();
        tch::no_grad(|| rows *= 2.0);
    }
    let own = 4.0 * averaged;
    ensure!(forward()? == own);
    if fails {
        limit()?;
    }
    let told = ema.apply(|| {
        none()?;
        anyhow::Ok(forward())
    });
    none()?;
    match (fails, told) {
        (true, Err(error)) => ensure!(error.to_string().contains("out of memory"), "{error}"),
        (false, Ok(told)) => is_of_rank_1(&told?.map(drop), "applying the averages of weights: ")?,
        (_, told) => anyhow::bail!("{told:?}"),
    }
    ensure!(forward()? == own, "the weights are back");
    ensure!(ema.apply(forward)?? == averaged, "and so are the averages");
    ensure!(forward()? == own);

    let told = ema.apply(|| {
        let computed = forward();
        if fails {
            limit()?;
        }
        anyhow::Ok(computed)
    });
    none()?;
    match (fails, told) {
        (true, Err(error)) => ensure!(error.to_string().contains("out of memory"), "{error}"),
        (false, Ok(told)) => {
            ensure!(told?? == averaged);
            is_of_rank_1(&forward().map(drop), "taking back the averages of weights: ")?;
        }
        (_, told) => anyhow::bail!("{told:?}"),
    }
    Ok(())
}

/// ZeRO-1 and ZeRO-2 have whole parameters: each rank has the same averages, those of one process.
pub fn zero(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    for stage in [1, 2] {
        let (rank, model, alone) = (group.rank(), Model::new(1 + group.rank() as i64), Model::new(1));
        let ddp = if stage == 1 { Some(DistributedDataParallel::new(&model.vs, &group)?) } else { None };
        let mut opt = ZeroRedundancyOptimizer::new(&model.vs, &group, adamw)?;
        let sharded = if stage == 2 { Some(ShardedDataParallel::new(&mut opt)?) } else { None };
        let mut single = adamw((&alone.vs).into_parameters())?;
        let (mut found, mut expected) = (AveragedModel::new(&model.vs, EMA)?, AveragedModel::new(&alone.vs, EMA)?);
        for step in 0..STEPS {
            let batch = data(step, 0, rank);
            if let Some(ddp) = &ddp {
                let outputs = ddp.forward(|| model.forward(&batch.0))?;
                ddp.backward(&(outputs - &batch.1).square().mean(Kind::Double))?;
            }
            if let Some(sharded) = &sharded {
                sharded.backward(&model.loss(&batch))?;
            }
            opt.step()?;
            opt.zero_grad()?;
            step_alone(&alone, &mut *single, &large_batch(step, 1, group.size()), None)?;
            found.update()?;
            expected.update()?;
            let own = averages(&found)?;
            close(&own, &averages(&expected)?).with_context(|| format!("stage {stage}, step {step}"))?;
            for (name, own) in own {
                let mut of_rank_0 = own.copy();
                group.broadcast(&mut of_rank_0, 0)?;
                ensure!(own.equal(&of_rank_0), "{name} of stage {stage} is another on rank {rank}");
            }
        }
    }
    Ok(())
}

pub fn saved() -> Result<()> {
    run("averages_saved", 3)
}

pub fn saved_hybrid() -> Result<()> {
    run("averages_hybrid", 4)
}

fn run(scenario: &str, ranks: usize) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let port = free_port();
    let vars = [(FOLDER, folder.path().to_str().context("a path in UTF-8")?)];
    let ranks = (0..ranks).map(|rank| start(scenario, rank, ranks, port, &vars)).collect::<Result<Vec<_>>>()?;
    all_through(ranks, Instant::now()).map(drop)
}

fn resume(folder: &Path, group: &ProcessGroup, ema: &mut AveragedModel) -> Result<Result<(), CheckpointError>> {
    Ok(checkpoint(folder, group)?.resume(&mut [("ema", ema)]).map(drop))
}

/// 3 ranks save their rows; 2 ranks, a plain model and 3 ranks go on with them, to the bit.
pub fn checkpoints(meeting: &Meeting) -> Result<()> {
    let (group, folder) = (meeting.group()?, folder()?);
    let (rank, ranks) = (group.rank(), group.size());
    let sharded = Sharded::new(&group, 1)?;
    let mut opt: Opt = sharded.fsdp.optimizer(adamw)?;
    let mut ema = AveragedModel::new(&sharded.fsdp, EMA)?;
    for step in 0..3 {
        sharded.fsdp.backward(&sharded.loss(&data(step, 0, rank))?)?;
        opt.step()?;
        opt.zero_grad()?;
        ema.update()?;
    }
    let mut saving = checkpoint(&folder, &group)?;
    saving.save(3, &[("ema", &ema)])?;
    saving.finish()?;
    let mut whole = Named::new();
    for to in 0..ranks {
        let own = ema.apply(|| sharded.fsdp.consolidate_state_dict(to))??;
        whole = own.map_or(whole, |own| tensors(&own));
    }
    let is_whole = |found: &AveragedModel, (rank, ranks): (usize, usize)| -> Result<()> {
        ensure!(found.n_averaged() == 3);
        same(&averages(found)?, &rows_of((rank, ranks), &whole))
    };
    if let Some(pair) = group.new_group(&[0, 1])? {
        let other = Sharded::new(&pair, 2)?;
        let mut found = AveragedModel::new(&other.fsdp, EMA)?;
        resume(&folder, &pair, &mut found)??;
        is_whole(&found, (pair.rank(), 2)).context("2 ranks")?;
        let told = found.load_state_dict(&ema.state_dict()?).err().context("another rank's part")?;
        ensure!(told.to_string().contains("that of rank"), "{told}");
    }
    if let Some(alone) = group.new_group(&[0])? {
        let other = Model::new(3);
        let mut found = AveragedModel::new(&other.vs, EMA)?;
        resume(&folder, &alone, &mut found)??;
        is_whole(&found, (0, 1)).context("whole parameters")?;
        let file = folder.join("ema.safetensors");
        consolidate(&folder, None, "ema", &file)?;
        for (name, tensor) in Tensor::read_safetensors(&file)? {
            let (_, expected) = whole.iter().find(|(it, _)| name == format!("module.{it}")).context(name.clone())?;
            ensure!(tensor.equal(expected), "{name}");
        }
        // A whole state, and another model's.
        let one = Sharded::new(&alone, 4)?;
        let mut rows = AveragedModel::new(&one.fsdp, EMA)?;
        rows.load_state_dict(&found.state_dict()?)?;
        is_whole(&rows, (0, 1)).context("a whole state")?;
        let large = Model::large(1);
        let told = resume(&folder, &alone, &mut AveragedModel::new(&large.vs, EMA)?)?.err().context("another model")?;
        ensure!(matches!(&told, CheckpointError::Part { part, .. } if part == "ema"), "{told:?}");
    }
    group.barrier()?;
    let other = Sharded::new(&group, 5)?;
    let mut found = AveragedModel::new(&other.fsdp, EMA)?;
    resume(&folder, &group, &mut found)??;
    is_whole(&found, (rank, ranks)).context("3 ranks")
}

/// Pairs of 4 ranks have the same rows: 3 ranks, and 4 with other parts, go on with them, to the bit.
pub fn hybrid(meeting: &Meeting) -> Result<()> {
    let (group, folder) = (meeting.group()?, folder()?);
    let rank = group.rank();
    let mesh = DeviceMesh::new(&group, &[("replicate", 2), ("shard", 2)])?;
    let part = mesh.group("shard")?;
    let pairs = |seed: i64| {
        let builder = FullyShardedDataParallel::hybrid(&mesh, "replicate", "shard")?;
        Sharded::over(builder, seed, &[1, 2], (part.rank(), part.size()))
    };
    let (sharded, alone) = (pairs(1)?, Model::new(1));
    let mut opt: Opt = sharded.fsdp.optimizer(adamw)?;
    let mut single = adamw((&alone.vs).into_parameters())?;
    let (mut ema, mut expected) = (AveragedModel::new(&sharded.fsdp, EMA)?, AveragedModel::new(&alone.vs, EMA)?);
    for step in 0..4 {
        sharded.fsdp.backward(&sharded.loss(&data(step, 0, rank))?)?;
        opt.step()?;
        opt.zero_grad()?;
        step_alone(&alone, &mut *single, &large_batch(step, 1, group.size()), None)?;
        ema.update()?;
        expected.update()?;
        close(&averages(&ema)?, &rows_of((part.rank(), part.size()), &averages(&expected)?))?;
    }
    let inputs = data(0, 1, rank).0;
    let averaged = expected.apply(|| outputs_alone(&alone, &inputs))?;
    ema.apply(|| close(&outputs(&sharded, &inputs)?, &averaged))??;
    close(&outputs(&sharded, &inputs)?, &outputs_alone(&alone, &inputs))?;
    let mut saving = checkpoint(&folder, &group)?;
    saving.save(4, &[("ema", &ema)])?;
    saving.finish()?;
    let mut whole = Named::new();
    for to in 0..group.size() {
        let own = ema.apply(|| sharded.fsdp.consolidate_state_dict(to))??;
        whole = own.map_or(whole, |own| tensors(&own));
    }
    if let Some(three) = group.new_group(&[0, 1, 2])? {
        let other = Sharded::new(&three, 2)?;
        let mut found = AveragedModel::new(&other.fsdp, EMA)?;
        resume(&folder, &three, &mut found)??;
        same(&averages(&found)?, &rows_of((three.rank(), 3), &whole)).context("3 ranks")?;
    }
    group.barrier()?;
    let other = Sharded::new(&group, 5)?;
    let mut found = AveragedModel::new(&other.fsdp, EMA)?;
    resume(&folder, &group, &mut found)??;
    same(&averages(&found)?, &rows_of((rank, group.size()), &whole)).context("4 ranks")?;
    let again = pairs(6)?;
    let mut found = AveragedModel::new(&again.fsdp, EMA)?;
    resume(&folder, &group, &mut found)??;
    same(&averages(&found)?, &averages(&ema)?).context("pairs")
}
