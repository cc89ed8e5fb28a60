//! Less memory on the device: functions that run again, and smaller batches.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use overdrive::ffi::cuda;
use overdrive::memory::account::{
    Category, MemoryRecord, MemoryRecorder, empty_cache, memory_snapshot, memory_stats, record_memory_history,
    set_allocator_settings, set_per_process_memory_fraction,
};
use overdrive::memory::{ActivationCheckpoint, Estimate, MemoryError, Policy, leak_check};
use overdrive::prelude::*;
use overdrive_fakecuda::{Fake, waits};

use crate::FLOAT;

fn layer(x: &Tensor, weight: &Tensor) -> Result<Tensor, tch::TchError> {
    x.f_matmul(weight)?.f_tanh()?.f_dropout(0.5, true)?.f_sin()
}

/// The gradients, and what the device's generator draws next.
fn train(policy: Option<&Policy>) -> Result<Vec<Tensor>> {
    manual_seed(9);
    let leaf = |size: &[i64]| Tensor::randn(size, FLOAT).set_requires_grad(true);
    let (x, weights) = (leaf(&[16, 16]), [leaf(&[16, 16]), leaf(&[16, 16])]);
    let mut y = x.shallow_clone();
    for weight in &weights {
        let weight = weight.shallow_clone();
        y = match policy {
            None => layer(&y, &weight)?,
            Some(policy) => {
                let options = ActivationCheckpoint::default().keep(policy.clone());
                options.run(move |[x]| layer(x, &weight), [&y])?
            }
        };
    }
    y.square().sum(Kind::Float).f_backward()?;
    let next = Tensor::rand([4], FLOAT);
    Ok(std::iter::once(&x).chain(&weights).map(Tensor::grad).chain([next]).collect())
}

/// The second run is on a thread of libtorch's, which has neither this one's generator nor its hooks.
pub fn functions_run_again_on_the_device() -> Result<()> {
    let policies =
        [Policy::Nothing, Policy::Products, Policy::Operators(Arc::new(|name, _| name == "aten::native_dropout"))];
    let expected = train(None)?;
    for policy in policies {
        let found = train(Some(&policy))?;
        let are_equal = found.iter().zip(&expected).all(|(one, other)| one.equal(other));
        ensure!(are_equal, "{policy:?}");
    }
    Ok(())
}

/// The input, such as tokens, is on the host, and dropout on the device.
pub fn functions_of_the_host_s_tensors_draw_the_same_on_the_device() -> Result<()> {
    let trained = |is_checkpointed: bool| -> Result<Vec<Tensor>> {
        manual_seed(9);
        let weight = Tensor::randn([16, 16], FLOAT).set_requires_grad(true);
        let own = weight.shallow_clone();
        let run = move |[x]: &[Tensor; 1]| layer(&x.f_to_device(FLOAT.1)?, &own);
        let input = Tensor::ones([16, 16], (Kind::Float, Device::Cpu));
        let y = if is_checkpointed { ActivationCheckpoint::default().run(run, [&input])? } else { run(&[input])? };
        y.square().sum(Kind::Float).f_backward()?;
        Ok(vec![weight.grad(), Tensor::rand([4], FLOAT)])
    };
    let (found, expected) = (trained(true)?, trained(false)?);
    ensure!(found.iter().zip(&expected).all(|(one, other)| one.equal(other)));
    Ok(())
}

pub fn functions_that_run_again_never_wait() -> Result<()> {
    train(Some(&Policy::Products))?;
    let fake = Fake::get().map(Fake::lend);
    if let Some(fake) = &fake {
        fake.reset();
        fake.trace_waits(true);
    }
    let forbid = cuda::ForbidSync::new()?;
    train(Some(&Policy::Products))?;
    train(Some(&Policy::Nothing))?;
    drop(forbid);
    if let Some(fake) = &fake {
        ensure!(waits(&fake.counts()) == 0, "{}", fake.waits());
    }
    Ok(())
}

/// A step's memory on the device is seen by category, and what a batch of another size needs is known.
pub fn device_memory_is_known_by_use_and_ahead() -> Result<()> {
    let weights = [Tensor::randn([64, 256], FLOAT), Tensor::randn([256, 8], FLOAT)].map(|w| w.set_requires_grad(true));
    let loss = |batch: i64| -> Result<Tensor, tch::TchError> {
        let x = Tensor::f_randn([batch, 64], FLOAT)?;
        x.f_matmul(&weights[0])?.f_tanh()?.f_matmul(&weights[1])?.f_square()?.f_sum(Kind::Float)
    };
    let step = |batch: i64| -> Result<(), tch::TchError> {
        for weight in &weights {
            weight.shallow_clone().zero_grad();
        }
        loss(batch)?.f_backward()
    };
    let record = |batch: i64| -> Result<MemoryRecord> {
        let recorder = MemoryRecorder::begin()?;
        step(batch)?;
        recorder.tag(Category::Parameter, &weights)?;
        Ok(recorder.end())
    };
    let device = FLOAT.1;
    let estimate = Estimate::of(device, |batch, recorder| {
        step(batch)?;
        recorder.tag(Category::Parameter, &weights)
    })?;
    ensure!(estimate.is_exact());
    for batch in [16, 500] {
        let measured = record(batch)?.peak(device);
        ensure!(estimate.peak(batch).total() == measured.total(), "{batch}: {estimate:?}, {measured:?}");
        let of_weights = 4 * (64 * 256 + 256 * 8);
        let by_use = [Category::Parameter, Category::Gradient].map(|it| measured.of(it));
        ensure!(by_use[0] == of_weights && by_use[1] <= of_weights, "{measured:?}");
    }
    let mut kept = Vec::new();
    let leaks = leak_check(|| loss(4).map(|loss| kept.push(loss)));
    ensure!(matches!(&leaks, Err(MemoryError::Leaked { leaks }) if leaks.iter().all(|it| it.device == device)));
    Ok(leak_check(|| step(4))?)
}

/// PyTorch's own snapshot, its settings, and its limit.
pub fn the_caching_allocator_is_reached() -> Result<()> {
    let device = FLOAT.1;
    record_memory_history(true)?;
    let kept = Tensor::zeros([1 << 20], FLOAT);
    let snapshot = memory_snapshot()?;
    record_memory_history(false)?;
    // A pickle with the names that the visualiser looks for.
    let has = |name: &str| snapshot.windows(name.len()).any(|part| part == name.as_bytes());
    ensure!(snapshot.first() == Some(&0x80) && has("segments") && has("device_traces") && has("alloc"));
    ensure!(memory_stats(device)?.allocated >= 4 << 20);
    drop(kept);
    set_allocator_settings("max_split_size_mb:512")?;
    ensure!(set_allocator_settings("no_such_setting:1").is_err());
    set_per_process_memory_fraction(1e-6, device)?;
    let refused = Tensor::f_zeros([64 << 20], FLOAT);
    set_per_process_memory_fraction(1.0, device)?;
    let error = overdrive::ffi::Error::from(refused.err().context("more than the device may have")?);
    ensure!(error.kind() == overdrive::ffi::ErrorKind::OutOfMemory, "{error}");
    ensure!(set_per_process_memory_fraction(2.0, device).is_err());
    empty_cache()?;
    Ok(())
}
