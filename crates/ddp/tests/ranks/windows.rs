//! Accumulation windows that close in unusual ways, compared with one process that sees all data; and calls that are
//! refused in the middle of a backward pass.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use overdrive_core::GradientSync;
use overdrive_ddp::{DdpBuilder, DdpError, DistributedDataParallel, GradBucket, ProcessGroup, ReduceOp, Work};
use overdrive_ffi::GradHook;
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;
use crate::training::{Model, assert_equal, data};

const STEPS: usize = 8;
const MICRO_BATCHES: usize = 3;

/// The model's paths that a rank uses, by step, micro-batch and rank; `None` where the rank skips backward.
type Plan = fn(usize, usize, usize) -> Option<&'static [usize]>;

const BOTH: Option<&[usize]> = Some(&[0, 1]);
const FIRST: Option<&[usize]> = Some(&[0]);
const SECOND: Option<&[usize]> = Some(&[1]);

fn closing(micro: usize) -> bool {
    micro + 1 == MICRO_BATCHES
}

const CLOSES_WITH_NOTHING: Plan = |_, micro, rank| if closing(micro) && rank == 1 { None } else { BOTH };
const ANOTHER_RANK_EACH_TIME: Plan = |step, micro, rank| if closing(micro) && step % 3 == rank { None } else { BOTH };
const FIRST_WINDOW_FULL: Plan = |step, micro, rank| if step > 0 && closing(micro) && rank == 1 { None } else { BOTH };
const NOTHING_AT_ALL: Plan = |step, _, rank| if step % 2 == rank % 2 { None } else { BOTH };
const NO_RANK_USES_THE_SECOND: Plan = |_, micro, rank| if closing(micro) && rank == 1 { None } else { FIRST };
const ALWAYS_THE_FIRST: Plan = |step, micro, rank| if step > 0 && closing(micro) && rank == 1 { None } else { FIRST };
const EARLIER_ON_ONE_RANK: Plan = |_, micro, rank| if micro == 0 && rank == 1 { SECOND } else { FIRST };
const EARLIER_ON_ALL: Plan = |_, micro, _| if micro == 0 { BOTH } else { FIRST };
const EARLIER_THEN_NOTHING: Plan = |_, micro, rank| match (micro, rank) {
    (0, 1) => SECOND,
    (2, 1) => None,
    _ => FIRST,
};

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let trains = |name: &'static str, options: fn(DdpBuilder) -> DdpBuilder, plan: Plan| {
        trains(&group, options, plan, name.contains("unused") || name.contains("earlier")).context(name)
    };
    let small = |builder: DdpBuilder| builder.bucket_cap_mb(1.0 / 4096.0);
    let finds = |builder: DdpBuilder| builder.find_unused_parameters(true);
    let finds_small = |builder: DdpBuilder| builder.find_unused_parameters(true).bucket_cap_mb(1.0 / 4096.0);
    let is_static = |builder: DdpBuilder| builder.static_graph(true);
    let views = |builder: DdpBuilder| builder.gradient_as_bucket_view(true);
    trains("plain, no last backward", |builder| builder, CLOSES_WITH_NOTHING)?;
    trains("small buckets, no last backward", small, ANOTHER_RANK_EACH_TIME)?;
    trains("plain, no backward at all", |builder| builder, NOTHING_AT_ALL)?;
    trains("views, no last backward", views, ANOTHER_RANK_EACH_TIME)?;
    trains("static graph, no last backward", is_static, FIRST_WINDOW_FULL)?;
    trains("static graph, no last backward from the start", is_static, CLOSES_WITH_NOTHING)?;
    trains("static graph, a path left out, no last backward", is_static, ALWAYS_THE_FIRST)?;
    trains("static graph, a path left out, no last backward from the start", is_static, NO_RANK_USES_THE_SECOND)?;
    trains("unused, no last backward", finds, CLOSES_WITH_NOTHING)?;
    trains("unused, no last backward on another rank each time", finds_small, ANOTHER_RANK_EACH_TIME)?;
    trains("unused, no backward at all", finds, NOTHING_AT_ALL)?;
    trains("unused by all, no last backward", finds, NO_RANK_USES_THE_SECOND)?;
    trains("used earlier on one rank", finds, EARLIER_ON_ONE_RANK)?;
    trains("used earlier on all ranks", finds_small, EARLIER_ON_ALL)?;
    trains("used earlier, no last backward", finds, EARLIER_THEN_NOTHING)
}

fn trains(group: &ProcessGroup, options: fn(DdpBuilder) -> DdpBuilder, plan: Plan, finds: bool) -> Result<()> {
    let (rank, ranks) = (group.rank(), group.size());
    let (model, reference) = (Model::new(1), Model::new(1));
    let ddp = options(DistributedDataParallel::builder(group)).build(&model.vs)?;
    let sync = |held: Result<(), overdrive_core::SyncError>| held.map_err(|error| anyhow::anyhow!("{error}"));
    for step in 0..STEPS {
        for micro in 0..MICRO_BATCHES {
            let batch = data(step, micro, rank);
            let paths = plan(step, micro, rank);
            // The forward pass also runs where backward is skipped.
            let outputs = ddp.forward(|| model.forward(&batch.0, paths.unwrap_or(&[0])))?;
            let loss = (outputs - &batch.1).square().mean(Kind::Double);
            if micro == 0 || closing(micro) {
                sync(ddp.hold_back(!closing(micro)))?;
            }
            match paths {
                Some(_) => ddp.backward(&(loss / MICRO_BATCHES as f64))?,
                None if closing(micro) => sync(ddp.close_with_nothing())?,
                None => {}
            }
            for (other, paths) in (0..ranks).filter_map(|other| Some((other, plan(step, micro, other)?))) {
                (reference.loss(&data(step, micro, other), paths) / (MICRO_BATCHES * ranks) as f64).backward();
            }
        }
        let gradients = |model: &Model| model.vs.trainable_variables().iter().map(Tensor::grad).collect::<Vec<_>>();
        for (index, (ours, expected)) in gradients(&model).iter().zip(gradients(&reference)).enumerate() {
            let alike = match (ours.defined(), expected.defined()) {
                (true, true) => ours.allclose(&expected, 1e-9, 1e-12, false),
                // Without a search for unused parameters, these have gradients of zero.
                (true, false) => !finds && ours.count_nonzero(None).int64_value(&[]) == 0,
                (false, defined) => !defined,
            };
            ensure!(alike, "step {step}, parameter {index}: {ours:?} instead of {expected:?}");
        }
        model.step(false);
        reference.step(false);
        assert_equal(&model, &reference, step)?;
    }
    Ok(())
}

/// One parameter, and a `DistributedDataParallel` that hooks can reach.
fn reachable(group: &ProcessGroup) -> Result<(Tensor, Arc<Mutex<DistributedDataParallel>>)> {
    let param = Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let params = vec![("w".to_owned(), param.shallow_clone())];
    let ddp = DistributedDataParallel::builder(group).build_from(params, Vec::new())?;
    Ok((param, Arc::new(Mutex::new(ddp))))
}

/// Makes six calls that are not allowed in a backward pass, and returns how many were refused: six, or an error.
fn refused(ddp: &Mutex<DistributedDataParallel>) -> Result<usize> {
    let ddp = ddp.lock().unwrap_or_else(PoisonError::into_inner);
    let hold = ddp.hold_back(true).err().context("hold_back")?;
    let close = ddp.close_with_nothing().err().context("close_with_nothing")?;
    let log = ddp.logging_data().err().context("logging_data")?;
    let forward = ddp.forward(|| Tensor::ones([1], (Kind::Float, Device::Cpu))).err().context("forward")?;
    let hook = |_: &GradBucket| -> Result<Work<Tensor>, DdpError> { Err(DdpError::NoLauncher) };
    let hook = ddp.register_comm_hook(hook).err().context("register_comm_hook")?;
    let fp16 = ddp.register_fp16_compress().err().context("register_fp16_compress")?;
    let called = [log, forward, hook, fp16].map(|error| Some(Box::new(error)));
    for error in [hold.0.downcast::<DdpError>().ok(), close.0.downcast().ok()].into_iter().chain(called) {
        ensure!(matches!(error.as_deref(), Some(DdpError::WithinBackward { .. })), "{error:?}");
    }
    // `no_sync` is allowed: it affects only later forward passes.
    drop(ddp.no_sync());
    Ok(6)
}

pub fn within_backward(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let mean = (1..=group.size()).sum::<usize>() as f64 / group.size() as f64;
    for by_comm_hook in [true, false] {
        let (param, ddp) = reachable(&group)?;
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (within, log, sums) = (Arc::downgrade(&ddp), seen.clone(), group.clone());
        let call = move || {
            let Some(ddp) = within.upgrade() else { return };
            let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
            log.push(refused(&ddp));
            // Another thread is refused while the communication hook runs.
            if by_comm_hook {
                log.push(std::thread::spawn(move || refused(&ddp)).join().unwrap_or(Ok(0)));
            }
        };
        let _hook = if by_comm_hook {
            ddp.lock().unwrap_or_else(PoisonError::into_inner).register_comm_hook(move |bucket: &GradBucket| {
                call();
                let mut sum = bucket.buffer.shallow_clone();
                Ok(sums.all_reduce_async(&mut sum, ReduceOp::Avg)?.and_then(move |()| Ok(sum)))
            })?;
            None
        } else {
            Some(GradHook::new(&param, call)?)
        };
        for step in 1..=3 {
            let inputs = Tensor::full([2], group.rank() as i64 + 1, (Kind::Float, Device::Cpu));
            let outputs = ddp.lock().unwrap_or_else(PoisonError::into_inner).forward(|| &param * inputs)?;
            outputs.sum(Kind::Float).f_backward()?;
            let grad = param.grad().double_value(&[0]);
            ensure!((grad - mean * f64::from(step)).abs() < 1e-6, "step {step}: {grad}");
        }
        let seen = std::mem::take(&mut *seen.lock().unwrap_or_else(PoisonError::into_inner));
        ensure!(seen.len() == if by_comm_hook { 6 } else { 3 }, "{} calls", seen.len());
        for calls in seen {
            ensure!(calls? == 6);
        }
        // After the pass they are allowed.
        ddp.lock().unwrap_or_else(PoisonError::into_inner).logging_data()?;
    }
    Ok(())
}
