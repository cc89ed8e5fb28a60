//! Communication hooks that fail: what is said in the pass itself, and in every pass from then on.

use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::{Context, Result, ensure};
use overdrive_core::GradientSync;
use overdrive_ddp::{CommHook, DdpError, DistributedDataParallel, GradBucket, ProcessGroup, Work};
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;
use crate::hooks::small;

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

/// The panic goes on in `backward`, or in the next `forward` when backward was tch's own.
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
            ensure!(matches!(panic, Ok(Err(_))), "tch's backward tells of a failure");
            catch_unwind(AssertUnwindSafe(|| ddp.forward(|| &param * 2).map(drop))).err()
        };
        let panic = panic.context("the panic was swallowed")?;
        let said = panic.downcast_ref::<&str>().copied().unwrap_or_default();
        ensure!(said == "planted in a hook", "{said}");
        stays_failed(&ddp, &param, "it panicked: planted in a hook")?;
    }
    Ok(())
}

/// What a hook makes of its bucket's buffer.
type Mean = fn(&Tensor) -> Tensor;

/// A hook with such a result.
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

    // The buffer holds two numbers: the message says what the result is, and none of its numbers.
    let results: [(Mean, &str); 6] = [
        (|like| like.new_full([1], 7.25, FLOAT), "is Float of shape [1] on Cpu,"),
        (|like| like.new_full([1, 3], 7.25, FLOAT), "is Float of shape [1, 3] on Cpu,"),
        (|like| like.new_full([2], 7.25, (Kind::Double, Device::Cpu)), "is Double of shape [2] on Cpu,"),
        (|like| like.new_full([1], 7.25, FLOAT).expand([2], false), "is Float of shape [2] on Cpu with strides [0],"),
        (|like| like.new_full([2], 7.25, FLOAT).to_sparse_sparse_dim(1), "is sparse, Float of shape [2] on Cpu,"),
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
    goes_on_when_built_anew(&group)
}

/// What backward says of a hook's error.
fn fails(ddp: &DistributedDataParallel, param: &Tensor) -> Result<String> {
    let loss = ddp.forward(|| param * 2)?.sum(Kind::Float);
    let error = ddp.backward(&loss).err().context("nothing was said")?;
    ensure!(matches!(error, DdpError::Hook(_)), "{error}");
    Ok(error.to_string())
}

/// Whatever would start or end a pass names the first failure, and what to do; nothing runs, and nothing waits.
fn stays_failed(ddp: &DistributedDataParallel, param: &Tensor, first: &str) -> Result<()> {
    for _ in 0..2 {
        let forward = ddp.forward(|| -> Tensor { panic!("the model was run") }).map(drop);
        let backward = ddp.backward(&param.sum(Kind::Float));
        let accumulated = [ddp.hold_back(true), ddp.hold_back(false), ddp.close_with_nothing()];
        let accumulated = accumulated.into_iter().map(|said| match said {
            Ok(()) => Ok(()),
            Err(error) => Err(*error.0.downcast::<DdpError>().unwrap_or_else(|_| Box::new(DdpError::NoLauncher))),
        });
        for said in [forward, backward].into_iter().chain(accumulated) {
            let error = said.err().context("a pass behind a failed one was taken")?;
            ensure!(matches!(error, DdpError::HookHasFailed { .. }), "{error}");
            let said = error.to_string();
            ensure!(said.contains(first) && said.contains("build the DistributedDataParallel anew"), "{said}");
        }
    }
    Ok(())
}

/// The same parameter and group, with another wrapper.
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
