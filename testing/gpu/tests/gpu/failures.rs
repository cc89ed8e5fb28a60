//! Training on a device that fails: errors are typed and name what failed, nothing panics or hangs, and what can go on
//! goes on.

use std::error::Error;

use anyhow::{Result, bail, ensure};
use overdrive::dataload::{OnDevice, TensorDataset};
use overdrive::prelude::*;
use overdrive_fakecuda::Pace;
use tch::nn::{self, Module};

use crate::{FLOAT, GPU, fake};

/// `cudaErrorInvalidValue`: the call is refused, and the device goes on.
const INVALID_VALUE: i32 = 1;
/// `cudaErrorLaunchFailure`: the process cannot use the device any more.
const LAUNCH_FAILURE: i32 = 719;
/// `cudaErrorDevicesUnavailable`.
const UNAVAILABLE: i32 = 46;

/// The error that was expected, which has to speak of CUDA.
fn cuda_error<T, E: Error + Send + Sync + 'static>(what: &str, result: Result<T, E>) -> Result<String> {
    let Err(error) = result else { bail!("{what}: no error") };
    let text = format!("{:#}", anyhow::Error::from(error));
    ensure!(text.contains("CUDA"), "{what}: {text}");
    Ok(text)
}

struct Training {
    model: nn::Linear,
    opt: AdamW,
    inputs: Tensor,
}

impl Training {
    fn new() -> Result<Self> {
        let vs = nn::VarStore::new(GPU);
        let model = nn::linear(vs.root(), 8, 8, Default::default());
        let opt = AdamW::builder(vs.trainable_variables()).lr(1e-2).build()?;
        Ok(Self { model, opt, inputs: Tensor::ones([4, 8], FLOAT) })
    }

    fn backward(&mut self) {
        self.model.forward(&self.inputs).square().mean(Kind::Float).backward();
    }

    fn values(&self) -> Result<Vec<f32>> {
        Ok(Vec::try_from(self.model.ws.f_view([-1])?.f_to_device(Device::Cpu)?)?)
    }
}

/// Each launch of a step fails in turn: the step says so, and no later one is disturbed.
pub fn a_launch_that_fails_is_the_steps_error_and_the_next_step_works() -> Result<()> {
    let fake = fake()?;
    let mut training = Training::new()?;
    training.backward();
    training.opt.step()?;
    for nth in 1.. {
        training.opt.zero_grad()?;
        training.backward();
        let before = training.values()?;
        fake.fail("", nth, INVALID_VALUE);
        let stepped = training.opt.step();
        fake.heal();
        if stepped.is_ok() {
            ensure!(nth > 2, "a step has at least two kernels");
            ensure!(training.values()? != before, "the step did nothing");
            return Ok(());
        }
        let text = cuda_error(&format!("kernel {nth}"), stepped)?;
        ensure!(text.contains("invalid argument"), "{text}");
        ensure!(training.values()?.iter().all(|value| value.is_finite()));
        training.opt.step()?;
    }
    Ok(())
}

/// The device is behind: the failure comes after the step has returned.
pub fn a_kernel_that_fails_is_told_by_whatever_waits_next() -> Result<()> {
    let fake = fake()?;
    let mut training = Training::new()?;
    let mut scaler = GradScaler::new(GPU);
    let loader = loader(GPU)?;
    training.backward();
    training.opt.step()?;
    drop(scaler.scale(&Tensor::ones([1], FLOAT))?);
    fake.set_pace(Pace::Lazy);
    fake.fail_later("", 1, LAUNCH_FAILURE);
    training.opt.step()?;
    cuda_error("reading the parameters", training.model.ws.f_to_device(Device::Cpu))?;
    // The process has lost its device: every part says so.
    cuda_error("a step", training.opt.step())?;
    cuda_error("the scale", scaler.scale_value())?;
    cuda_error("a new scale", scaler.update_to(2.0))?;
    let Some(batch) = loader.iter().next() else { bail!("no batch") };
    cuda_error("a batch", batch)?;
    cuda_error("a cache", loader_with_cache(GPU))?;
    Ok(())
}

const SAMPLES: usize = 48;

fn samples() -> (Tensor, Tensor) {
    let numbers = Tensor::arange(48 * 64, (Kind::Float, Device::Cpu)).view([48, 64]);
    (numbers, Tensor::arange(48, (Kind::Int64, Device::Cpu)))
}

fn loader(device: Device) -> Result<DataLoader<(Tensor, Tensor)>, overdrive::dataload::DataError> {
    DataLoader::builder(TensorDataset::new(samples())?).batch_size(8).num_workers(2).to_device(device).build()
}

/// The first batch of a cache on the device.
fn loader_with_cache(device: Device) -> Result<(Tensor, Tensor), overdrive::dataload::DataError> {
    let loader = DataLoader::builder(TensorDataset::new(samples())?).batch_size(8).cache(OnDevice(device))?.build()?;
    loader.iter().next().unwrap_or_else(|| Ok((Tensor::new(), Tensor::new())))
}

/// No batch may be on its way: libtorch ends the process if a pinned batch under way is freed on a lost device.
pub fn a_lost_device_ends_an_epoch_with_an_error() -> Result<()> {
    let fake = fake()?;
    let loader = DataLoader::builder(TensorDataset::new(samples())?).batch_size(8).to_device(GPU).build()?;
    let mut epoch = loader.iter();
    let Some(first) = epoch.next() else { bail!("no batch") };
    let first = first?;
    fake.lose(0, UNAVAILABLE);
    // Its memory was in use.
    drop(first);
    let Some(error) = epoch.find_map(Result::err) else { bail!("the epoch went on without a device") };
    cuda_error("a batch", Err::<(), _>(error))?;
    drop(epoch);
    fake.heal();
    ensure!(loader.iter().filter_map(Result::ok).count() == SAMPLES / 8, "the loader is used up");
    Ok(())
}

pub fn a_full_device_ends_an_epoch_and_the_next_one_is_whole() -> Result<()> {
    let fake = fake()?;
    overdrive::ffi::cuda::empty_cache()?;
    ensure!(fake.limit(0, 1 << 10));
    let loader = loader(GPU)?;
    let Some(error) = loader.iter().find_map(Result::err) else { bail!("the device has room") };
    ensure!(format!("{:#}", anyhow::Error::from(error)).contains("out of memory"));
    ensure!(fake.limit(0, 1 << 34));
    ensure!(loader.iter().filter_map(Result::ok).count() == SAMPLES / 8, "the loader is used up");
    Ok(())
}

/// A first step allocates its state. Without room it fails, and the same step works once there is some.
pub fn a_full_device_leaves_an_optimizer_as_it_was() -> Result<()> {
    let fake = fake()?;
    let mut training = Training::new()?;
    let vs = nn::VarStore::new(GPU);
    let large = vs.root().zeros("large", &[1 << 22]);
    training.opt = AdamW::builder(vs.trainable_variables()).lr(1e-2).build()?;
    large.sum(Kind::Float).backward();
    overdrive::ffi::cuda::empty_cache()?;
    ensure!(fake.limit(0, (1 << 22) * 4 * 3));
    let Err(error) = training.opt.step() else { bail!("there is room for the state") };
    ensure!(format!("{:#}", anyhow::Error::from(error)).contains("out of memory"));
    ensure!(
        large.to_device(Device::Cpu).abs().max().double_value(&[]) == 0.0,
        "a step that failed has moved its parameter"
    );
    ensure!(fake.limit(0, 1 << 34));
    training.opt.step()?;
    let moved = large.double_value(&[0]);
    ensure!((moved + 1e-2).abs() < 1e-6, "{moved} is not the first step's");
    Ok(())
}

/// Memory runs out while a model gets its averages, of float32 where its weights are of bfloat16: it has its weights back.
pub fn a_full_device_gives_a_model_its_weights_back() -> Result<()> {
    let fake = fake()?;
    const SIZE: i64 = 1 << 24;
    let mut vs = nn::VarStore::new(GPU);
    for name in ["first", "second"] {
        let _ = vs.root().ones(name, &[SIZE]);
    }
    vs.bfloat16();
    let weights = vs.trainable_variables();
    let mut averaged = AveragedModel::new(&vs, Averaging::Ema { decay: 0.9 })?;
    averaged.update()?;
    for weight in &weights {
        tch::no_grad(|| drop(weight.shallow_clone().fill_(7.0)));
    }
    overdrive::ffi::cuda::empty_cache()?;
    // Room for a copy of one weight, and neither of two nor of one in float32.
    let used = overdrive::ffi::cuda::memory_stats(0)?.reserved_bytes;
    ensure!(fake.limit(0, used as usize + 3 * SIZE as usize));
    let Err(error) = averaged.apply(|| ()) else { bail!("there is room for copies of both weights") };
    ensure!(format!("{:#}", anyhow::Error::from(error)).contains("out of memory"));
    ensure!(fake.limit(0, 1 << 34));
    for weight in &weights {
        let value = weight.double_value(&[0]);
        ensure!(value == 7.0, "{value} is not the weight's");
    }
    Ok(())
}

/// Device 7 of at most 4.
pub fn a_device_that_does_not_exist_is_named() -> Result<()> {
    if tch::Cuda::device_count() > 7 {
        return Ok(());
    }
    let nowhere = Device::Cuda(7);
    let batch = loader(nowhere).and_then(|loader| loader.iter().next().unwrap_or_else(|| Ok(Default::default())));
    cuda_error("a loader", batch.map(drop))?;
    cuda_error("a cache", loader_with_cache(nowhere))?;
    cuda_error("memory", overdrive::ffi::cuda::memory_stats(7))?;
    Ok(())
}
