//! Communication hooks that fail: the error in the pass itself, and in every later pass.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, bail, ensure};
use overdrive_core::{GradientSync, SyncError};
use overdrive_ddp::{
    CommHook, DdpError, DistributedDataParallel, GradBucket, OneBitAdam, OneBitAdamOptions, ProcessGroup, ReduceOp,
    Work,
};
use tch::{Device, Kind, Tensor};

use crate::harness::{Meeting, PATIENCE};
use crate::hooks::small;

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

/// The panic is resumed in `backward`, or in the next `forward` after tch's own backward.
pub fn panicking(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    for own_backward in [true, false] {
        let (param, ddp) = small(&group)?;
        ddp.register_comm_hook(|_: &GradBucket| -> Result<Work<Tensor>, DdpError> { panic!("planted in a hook") })?;
        let loss = ddp.forward(|| &param * 2)?.sum(Kind::Float);
        let panic = catch_unwind(AssertUnwindSafe(|| {
            if own_backward {
                ddp.backward(&loss).map_err(|error| error.to_string())
            } else {
                loss.f_backward().map_err(|error| error.to_string())?;
                Ok(())
            }
        }));
        let panic = if own_backward {
            panic.err()
        } else {
            ensure!(matches!(panic, Ok(Err(_))), "tch's backward reports a failure");
            catch_unwind(AssertUnwindSafe(|| ddp.forward(|| &param * 2).map(drop))).err()
        };
        let panic = panic.context("the panic was swallowed")?;
        let said = panic.downcast_ref::<&str>().copied().unwrap_or_default();
        ensure!(said == "planted in a hook", "{said}");
        stays_failed(&ddp, &param, "it panicked: planted in a hook")?;
    }
    Ok(())
}

/// Computes a hook's result from its bucket's buffer.
type Mean = fn(&Tensor) -> Tensor;

/// A hook that returns that result.
struct Makes(Mean);

impl CommHook for Makes {
    type InFlight = ();

    fn start(&mut self, _bucket: &GradBucket) -> Result<(), DdpError> {
        Ok(())
    }

    fn finish(&mut self, bucket: &GradBucket, (): ()) -> Result<Tensor, DdpError> {
        Ok((self.0)(&bucket.buffer))
    }
}

pub fn failing(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let (param, ddp) = small(&group)?;
    ddp.register_comm_hook(|_: &GradBucket| -> Result<Work<Tensor>, DdpError> { Err(DdpError::NoLauncher) })?;
    let said = fails(&ddp, &param)?;
    ensure!(said.contains("no launcher"), "{said}");
    stays_failed(&ddp, &param, "no launcher")?;

    // The buffer holds two numbers. The message describes the result, without its values.
    let results: [(Mean, &str); 7] = [
        (|like| like.new_full([1], 7.25, FLOAT), "is Float of shape [1] on Cpu,"),
        (|like| like.new_full([1, 3], 7.25, FLOAT), "is Float of shape [1, 3] on Cpu,"),
        (|like| like.new_full([2], 7.25, (Kind::Double, Device::Cpu)), "is Double of shape [2] on Cpu,"),
        (|like| like.new_full([1], 7.25, FLOAT).expand([2], false), "is Float of shape [2] on Cpu with strides [0],"),
        (|like| like.new_full([2], 7.25, FLOAT).to_sparse_sparse_dim(1), "is sparse, Float of shape [2] on Cpu,"),
        // As many numbers as the buffer; tch does not know this layout.
        (|_| compressed(), "is compressed sparse, Float of shape [1, 2] on Cpu,"),
        (|_| Tensor::new(), "is undefined,"),
    ];
    for (result, found) in results {
        let (param, ddp) = small(&group)?;
        ddp.register_comm_hook(Makes(result))?;
        let said = fails(&ddp, &param)?;
        let buffer = "Float of shape [2] on Cpu";
        let expected =
            format!("the mean of bucket 0 {found} but should be contiguous, and like the bucket's buffer, {buffer}");
        ensure!(said.contains(&expected) && !said.contains("7.25"), "{said} does not say {expected:?}");
        stays_failed(&ddp, &param, found)?;
    }
    // Collectives and models refuse such a tensor, too.
    let refused = group.all_reduce(&mut compressed(), ReduceOp::Sum).err().context("summed")?.to_string();
    ensure!(refused.contains("is compressed sparse, but should be dense"), "{refused}");
    let of = |param: Tensor, buffer: Tensor| {
        let (params, buffers) = (vec![("w".to_owned(), param)], vec![("b".to_owned(), buffer)]);
        let refused = DistributedDataParallel::builder(&group).build_from(params, buffers).err();
        refused.map(|error| error.to_string()).context("wrapped")
    };
    let dense = || Tensor::ones([2], FLOAT).set_requires_grad(true);
    let refused = [
        (of(compressed(), dense())?, "the parameter \"w\" is compressed sparse, but should be dense"),
        (of(dense(), compressed())?, "the buffer \"b\" is compressed sparse, but should be dense"),
        (of(dense(), Tensor::new())?, "the buffer \"b\" is undefined, but should be a tensor"),
        (of(dense(), dense().to_kind(Kind::Int16))?, "the buffer \"b\" is of dtype Int16, which no backend sends"),
    ];
    for (found, expected) in refused {
        ensure!(found == expected, "{found} instead of {expected}");
    }
    let refused = OneBitAdam::new(&group, [compressed()], OneBitAdamOptions::default()).err().context("taken")?;
    ensure!(refused.to_string().contains("is compressed sparse, but should be dense"), "{refused}");
    let (_, ddp) = small(&group)?;
    for rate in [0, u32::MAX] {
        let refused = ddp.set_logging_sample_rate(rate).err().context("a rate was taken")?.to_string();
        ensure!(refused.starts_with(&format!("the logging sample rate is {rate}, but should be 1 to")), "{refused}");
    }
    goes_on_when_built_anew(&group)
}

fn compressed() -> Tensor {
    Tensor::full([1, 2], 7.25, FLOAT).to_sparse_csr(None)
}

/// The message of backward's error when the hook fails.
fn fails(ddp: &DistributedDataParallel, param: &Tensor) -> Result<String> {
    let loss = ddp.forward(|| param * 2)?.sum(Kind::Float);
    let error = ddp.backward(&loss).err().context("no error")?;
    ensure!(matches!(error, DdpError::Hook(_)), "{error}");
    Ok(error.to_string())
}

/// Every call that would start or end a pass names the first failure and the remedy; nothing runs, and nothing waits.
fn stays_failed(ddp: &DistributedDataParallel, param: &Tensor, first: &str) -> Result<()> {
    for _ in 0..2 {
        let forward = ddp.forward(|| -> Tensor { panic!("the model was run") }).map(drop);
        let backward = ddp.backward(&param.sum(Kind::Float));
        let accumulated = [ddp.hold_back(true), ddp.hold_back(false), ddp.close_with_nothing()];
        let joined = ddp.join(false, || panic!("the loop was run"));
        for said in [forward, backward, joined].into_iter().chain(accumulated.map(plain)) {
            has_failed(said, first)?;
        }
    }
    Ok(())
}

/// Unpacks this crate's error from a `SyncError`.
fn plain(said: Result<(), SyncError>) -> Result<(), DdpError> {
    said.map_err(|error| *error.0.downcast::<DdpError>().unwrap_or_else(|_| Box::new(DdpError::NoLauncher)))
}

fn has_failed<T>(said: Result<T, DdpError>, first: &str) -> Result<()> {
    let error = said.err().context("a pass after the failed one was allowed")?;
    ensure!(matches!(error, DdpError::HookHasFailed { .. }), "{error}");
    let said = error.to_string();
    ensure!(said.contains(first) && said.contains("build the DistributedDataParallel anew"), "{said}");
    Ok(())
}

/// After tch's own backward, the hook's failure was not returned yet: calls other than `forward` and `backward` do not
/// take it, so that these still return it.
pub fn left(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    type Asks = fn(&DistributedDataParallel) -> Result<(), DdpError>;
    let first_to_ask: [Asks; 4] = [
        |ddp| plain(ddp.hold_back(true)),
        |ddp| plain(ddp.hold_back(false)),
        |ddp| plain(ddp.close_with_nothing()),
        |ddp| ddp.join(true, || panic!("the loop was run")),
    ];
    for asks in first_to_ask {
        let (param, ddp) = small(&group)?;
        ddp.register_comm_hook(|_: &GradBucket| -> Result<Work<Tensor>, DdpError> { Err(DdpError::NoLauncher) })?;
        ensure!(ddp.forward(|| &param * 2)?.sum(Kind::Float).f_backward().is_err());
        has_failed(asks(&ddp), "no launcher")?;
        let error = ddp.forward(|| &param * 2).err().context("the failure is gone")?;
        ensure!(matches!(&error, DdpError::Hook(inner) if inner.is::<DdpError>()), "{error}");
        stays_failed(&ddp, &param, "no launcher")?;

        let (param, ddp) = small(&group)?;
        ddp.register_comm_hook(|_: &GradBucket| -> Result<Work<Tensor>, DdpError> { panic!("planted in a hook") })?;
        ensure!(ddp.forward(|| &param * 2)?.sum(Kind::Float).f_backward().is_err());
        has_failed(asks(&ddp), "it panicked: planted in a hook")?;
        let panic = catch_unwind(AssertUnwindSafe(|| ddp.backward(&param.sum(Kind::Float)))).err();
        let panic = panic.context("the panic is gone")?;
        ensure!(panic.downcast_ref::<&str>() == Some(&"planted in a hook"));
    }
    Ok(())
}

/// A hook that averages and counts its calls; call number `failing` fails.
fn counted(group: &ProcessGroup, failing: usize) -> (Arc<AtomicUsize>, impl CommHook + use<>) {
    let calls = Arc::new(AtomicUsize::new(0));
    let (count, group) = (calls.clone(), group.clone());
    let hook = move |bucket: &GradBucket| {
        if count.fetch_add(1, Ordering::Relaxed) + 1 == failing {
            return Err(DdpError::NoLauncher);
        }
        let mut mean = bucket.buffer.shallow_clone();
        Ok(group.all_reduce_async(&mut mean, ReduceOp::Avg)?.and_then(move |()| Ok(mean)))
    };
    (calls, hook)
}

/// `join` runs no collectives once the hook has failed, whether in the loop or while it answers other ranks.
pub fn in_join(meeting: &Meeting) -> Result<()> {
    let group = meeting.group_with(PATIENCE, false)?;
    let rank = group.rank();
    let passes = |ddp: &DistributedDataParallel, param: &Tensor, count: usize| -> Result<(), DdpError> {
        (0..count).try_for_each(|_| ddp.backward(&ddp.forward(|| param * 2)?.sum(Kind::Float)))
    };

    // On all ranks, in the first pass, whose failure is not returned before `join` continues.
    let (param, ddp) = small(&group)?;
    let (calls, hook) = counted(&group, 1);
    ddp.register_comm_hook(hook)?;
    let joined = ddp.join(false, || ddp.forward(|| &param * 2).map(|out| out.sum(Kind::Float).f_backward()));
    has_failed(joined, "no launcher")?;
    let error = ddp.forward(|| &param * 2).err().context("the failure is gone")?;
    ensure!(matches!(error, DdpError::Hook(_)), "{error}");
    ensure!(calls.load(Ordering::Relaxed) == 1, "a hook that had failed was run again");

    // On rank 0, while it answers rank 1's second pass: rank 0 gets the error at once, rank 1 when rank 0 has ended.
    let (param, ddp) = small(&group)?;
    let (calls, hook) = counted(&group, if rank == 0 { 2 } else { usize::MAX });
    ddp.register_comm_hook(hook)?;
    let mut told = None;
    let joined = ddp.join(false, || told = passes(&ddp, &param, 1 + 2 * rank).err());
    if rank == 0 {
        ensure!(told.is_none(), "{told:?}");
        let error = joined.err().context("joined in spite of the hook")?;
        ensure!(matches!(&error, DdpError::Hook(_)) && error.to_string().contains("no launcher"), "{error}");
        stays_failed(&ddp, &param, "no launcher")?;
    } else {
        let error = told.context("rank 1 got no error although rank 0 does not answer")?;
        let DdpError::Hook(inner) = &error else { bail!("{error}") };
        let is_absence = matches!(inner.downcast_ref(), Some(DdpError::TimedOut { .. } | DdpError::Lost { .. }));
        ensure!(is_absence, "{error}");
        // That was a failure of its own hook, so it runs no more collectives.
        has_failed(joined, &inner.to_string())?;
    }
    ensure!(calls.load(Ordering::Relaxed) == 2, "a hook that had failed was run again");
    Ok(())
}

/// The same parameter and group work with a new wrapper.
fn goes_on_when_built_anew(group: &ProcessGroup) -> Result<()> {
    let (mut param, ddp) = small(group)?;
    ddp.register_comm_hook(Makes(|_| Tensor::new()))?;
    fails(&ddp, &param)?;
    drop(ddp);
    param.zero_grad();
    let params = vec![("w".to_owned(), param.shallow_clone())];
    let ddp = DistributedDataParallel::builder(group).build_from(params, Vec::new())?;
    let inputs = Tensor::full([2], group.rank() as i64 + 1, FLOAT);
    let loss = ddp.forward(|| &param * inputs)?.sum(Kind::Float);
    ddp.backward(&loss)?;
    let (grad, mean) = (param.grad().double_value(&[0]), (group.size() as f64 + 1.0) / 2.0);
    ensure!((grad - mean).abs() < 1e-6, "{grad} instead of {mean}");
    group.barrier()?;
    Ok(())
}
