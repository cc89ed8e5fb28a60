//! Steps on the host, for parameters on the device.

use anyhow::{Result, ensure};
use overdrive::core::{OptimizerError, Parameter};
use overdrive::ffi::{cuda, set_grad};
use overdrive::memory::CpuOffloadOptimizer;
use overdrive::optim::{Lookahead, clip_grad_norm_};
use overdrive::prelude::*;
use overdrive_fakecuda::{Pace, waits};

use super::{asks_for_nothing, count, each_forgotten_wait_is_found};
use crate::loading::{paces, watched};
use crate::{FLOAT, GPU, fake};

type Offloaded = CpuOffloadOptimizer<AdamW>;

fn adamw(params: Vec<Parameter>) -> Result<AdamW, OptimizerError> {
    AdamW::builder(params).lr(0.1).weight_decay(0.1).build()
}

/// Parameters of several layouts; the last one gets a gradient in every second step.
struct Model {
    params: Vec<Tensor>,
}

impl Model {
    fn new(device: Device) -> Self {
        let number = |at: i64| Tensor::arange(at * 24, (Kind::Float, Device::Cpu)).view([at, 4, 6]).sin();
        let layouts: [fn(Tensor) -> Tensor; 3] =
            [|it| it, |it| it.transpose(0, 2).contiguous().transpose(0, 2), |it| it];
        let param =
            |(at, layout): (i64, fn(Tensor) -> Tensor)| layout(number(at)).to_device(device).set_requires_grad(true);
        Self { params: (2..5).zip(layouts).map(param).collect() }
    }

    fn backward(&self, step: i64) -> Result<()> {
        let used = if step % 2 == 0 { &self.params[..] } else { &self.params[..2] };
        let loss = used.iter().map(|param| (param * (step + 1)).square().mean(Kind::Float));
        Ok(loss.sum::<Tensor>().f_backward()?)
    }

    fn values(&self) -> Vec<f32> {
        let flat = |param: &Tensor| Vec::<f32>::try_from(param.detach().contiguous().view([-1]).to_device(Device::Cpu));
        self.params.iter().flat_map(|param| flat(param).unwrap_or_default()).collect()
    }
}

/// Trains with what may happen between a backward pass and a step, and to the parameters between two steps.
fn train(model: &Model, opt: &mut dyn Optimizer, plain: bool) -> Result<()> {
    for step in 0..6 {
        model.backward(step)?;
        if !plain && step == 1 {
            model.backward(step + 1)?;
        }
        if !plain && step == 2 {
            clip_grad_norm_(&model.params, 0.01)?;
        }
        opt.step()?;
        opt.zero_grad()?;
        if !plain && step == 3 {
            let _ = tch::no_grad(|| model.params[0].shallow_clone().fill_(0.5));
        }
        if !plain && step == 4 {
            // A step that is skipped.
            model.backward(step)?;
            opt.step_skipped()?;
            opt.zero_grad()?;
        }
    }
    Ok(())
}

/// The values after a training on the CPU, and on the device with steps on the host.
fn expected(plain: bool) -> Result<Vec<f32>> {
    let model = Model::new(Device::Cpu);
    train(&model, &mut adamw(model.params.iter().map(|it| Parameter::unnamed(it.shallow_clone())).collect())?, plain)?;
    Ok(model.values())
}

fn offloaded(plain: bool) -> Result<Vec<f32>> {
    let model = Model::new(GPU);
    let mut opt = match plain {
        false => CpuOffloadOptimizer::new(&model.params, adamw)?,
        true => CpuOffloadOptimizer::with_offloaded_gradients(&model.params, adamw)?,
    };
    train(&model, &mut opt, plain)?;
    Ok(model.values())
}

/// The device rounds gradients otherwise, but a stand-in computes with the host's operators.
fn is_close(found: &[f32], expected: &[f32]) -> bool {
    let bound = if overdrive_fakecuda::Fake::get().is_some() { 0.0 } else { 1e-4 };
    found.len() == expected.len() && found.iter().zip(expected).all(|(one, other)| (one - other).abs() <= bound)
}

pub fn steps_on_the_host_equal_those_of_a_cpu() -> Result<()> {
    for plain in [false, true] {
        let (found, expected) = (offloaded(plain)?, expected(plain)?);
        ensure!(is_close(&found, &expected), "{plain}: {found:?} instead of {expected:?}");
    }
    // A state of the one is a state of the other.
    let (host, device) = (Model::new(Device::Cpu), Model::new(GPU));
    let mut plain = adamw(host.params.iter().map(|it| Parameter::unnamed(it.shallow_clone())).collect())?;
    let mut opt = CpuOffloadOptimizer::new(&device.params, adamw)?;
    train(&host, &mut plain, true)?;
    opt.load_state_dict(&plain.state_dict()?.copied()?)?;
    tch::no_grad(|| device.params.iter().zip(&host.params).for_each(|(to, from)| to.shallow_clone().copy_(from)));
    for (model, opt) in [(&host, &mut plain as &mut dyn Optimizer), (&device, &mut opt)] {
        model.backward(0)?;
        opt.step()?;
    }
    ensure!(is_close(&device.values(), &host.values()));
    Ok(())
}

pub fn steps_on_the_host_are_never_early() -> Result<()> {
    for plain in [false, true] {
        let expected = expected(plain)?;
        for pace in paces(50) {
            let (found, notes) = watched(pace, || offloaded(plain))?;
            ensure!(notes.is_empty(), "{plain}, {pace:?}: {}", notes.join("; "));
            ensure!(is_close(&found?, &expected), "{plain}, {pace:?}");
        }
    }
    Ok(())
}

pub fn a_forgotten_wait_for_a_step_on_the_host_is_found() -> Result<()> {
    each_forgotten_wait_is_found(|| offloaded(false).map(drop))
}

pub fn a_step_on_the_host_waits_once_and_allocates_nothing() -> Result<()> {
    const STEPS: u64 = 4;
    let (fake, model) = (fake()?.lend(), Model::new(GPU));
    let values = model.params.iter().map(Tensor::numel).sum::<usize>() as u64;
    for frees in [false, true] {
        let mut opt = match frees {
            false => Offloaded::new(&model.params, adamw)?,
            true => Offloaded::with_offloaded_gradients(&model.params, adamw)?,
        };
        let mut step = || -> Result<()> {
            model.backward(0)?;
            opt.step()?;
            Ok(opt.zero_grad()?)
        };
        for pace in [Pace::Eager, Pace::Lazy] {
            fake.set_pace(pace);
            (0..2).try_for_each(|_| step())?;
            fake.reset();
            fake.trace_waits(true);
            (0..STEPS).try_for_each(|_| step())?;
            let counts = fake.counts();
            ensure!(waits(&counts) == STEPS, "{frees}, {pace:?}: {} {}", waits(&counts), fake.waits());
            ensure!(asks_for_nothing(&counts), "{frees}, {pace:?}: {counts:?}");
            for name in ["bytes device to host, pinned", "bytes host to device, pinned"] {
                ensure!(count(&counts, name) == STEPS * 4 * values, "{frees}, {pace:?}, {name}: {counts:?}");
            }
        }
    }
    Ok(())
}

/// Four tensors of state, which are in files.
pub fn a_step_with_state_on_disk_waits_once() -> Result<()> {
    const STEPS: u64 = 3;
    let (fake, folder) = (fake()?.lend(), tempfile::tempdir()?);
    let params: Vec<_> = (0..2).map(|_| Tensor::ones([256, 512], FLOAT).set_requires_grad(true)).collect();
    let mut opt = Offloaded::new(&params, adamw)?.state_on_disk(folder.path())?;
    let mut step = || -> Result<()> {
        params.iter().map(|it| it.square().sum(Kind::Float)).sum::<Tensor>().f_backward()?;
        opt.step()?;
        Ok(opt.zero_grad()?)
    };
    for pace in [Pace::Eager, Pace::Lazy] {
        fake.set_pace(pace);
        step()?;
        fake.reset();
        fake.trace_waits(true);
        (0..STEPS).try_for_each(|_| step())?;
        ensure!(waits(&fake.counts()) == STEPS, "{pace:?}: {}", fake.waits());
    }
    Ok(())
}

pub fn gradients_that_are_freed_leave_the_device() -> Result<()> {
    const BYTES: i64 = 1 << 20;
    let params: Vec<_> = (0..16).map(|_| Tensor::ones([BYTES / 4], FLOAT).set_requires_grad(true)).collect();
    let opt = Offloaded::with_offloaded_gradients(&params, adamw)?;
    // Each gradient takes memory of its own.
    let backward = || -> Result<i64> {
        let mut loss = Tensor::zeros([], FLOAT);
        for param in &params {
            loss = (param * 2.0).sum(Kind::Float) + loss;
        }
        cuda::reset_peak_memory_stats(0)?;
        let before = cuda::memory_stats(0)?.allocated_bytes;
        loss.f_backward()?;
        Ok(cuda::memory_stats(0)?.allocated_peak_bytes - before)
    };
    let found = backward()?;
    ensure!(params.iter().all(|param| !param.grad().defined()));
    drop(opt);
    let plain = backward()?;
    ensure!(plain >= 16 * BYTES && found <= 7 * BYTES, "{found} bytes, {plain} without");
    Ok(())
}

pub fn what_does_not_fit_a_step_on_the_host_is_refused() -> Result<()> {
    let model = Model::new(GPU);
    let told = |result: Result<(), OptimizerError>| result.err().map(|it| it.to_string()).unwrap_or_default();
    let mut opt = Offloaded::with_offloaded_gradients(&model.params, adamw)?;
    model.backward(0)?;
    model.backward(0)?;
    let before = model.values();
    ensure!(told(opt.step()).contains("two backward passes before a step"));
    ensure!(model.values() == before);
    ensure!(clip_grad_norm_(&model.params, 1.0).is_err(), "there is nothing to clip");
    let second = Offloaded::with_offloaded_gradients(&model.params, adamw);
    ensure!(told(second.map(drop)).contains("number 0"), "they have hooks");
    drop(opt);
    let one = Tensor::ones([1], FLOAT).set_requires_grad(true);
    ensure!(told(Offloaded::new(&[&one * 2.0], adamw).map(drop)).contains("it is not a leaf"));
    let again = one.detach().set_requires_grad(true);
    ensure!(
        told(Offloaded::new(&[one.shallow_clone(), again], adamw).map(drop)).contains("the same memory as parameter 0")
    );
    let mut opt = Offloaded::new(&[one.shallow_clone()], adamw)?;
    let more = Tensor::ones([1], FLOAT).set_requires_grad(true);
    opt.inner_mut().add_param_group(AdamW::group([more]))?;
    ensure!(told(opt.step()).contains("parameters were added to the optimizer on the host"));
    // A pass for which no hook was called, as under `no_sync`, after one whose gradients were freed.
    let mut opt = Offloaded::with_offloaded_gradients(&[one.shallow_clone()], adamw)?;
    (&one * 2.0).f_backward()?;
    set_grad(&one, Some(&one.ones_like()))?;
    ensure!(told(opt.step()).contains("two backward passes before a step"));
    opt.zero_grad()?;
    (&one * 2.0).f_backward()?;
    opt.step()?;
    drop(opt);
    let mixed = [Tensor::ones([1], FLOAT), Tensor::ones([1], (Kind::Float, Device::Cpu))];
    ensure!(told(Offloaded::new(&mixed, adamw).map(drop)).contains("it is on Cpu, but the first one is on Cuda(0)"));
    ensure!(told(Offloaded::new(Vec::<Tensor>::new(), adamw).map(drop)).contains("no parameters"));
    let other = |_| adamw(vec![Parameter::unnamed(Tensor::ones([1], FLOAT).set_requires_grad(true))]);
    ensure!(told(Offloaded::new(&model.params, other).map(drop)).contains("that it was not given"));
    let in_backward = |params: Vec<Parameter>| AdamW::builder(params).build_in_backward();
    ensure!(told(CpuOffloadOptimizer::new(&model.params, in_backward).map(drop)).contains("another optimizer"));
    // One that has copies of its own.
    let lookahead = |params: Vec<Parameter>| Lookahead::new(adamw(params)?, 2, 0.5);
    let mut opt = CpuOffloadOptimizer::new(&model.params, lookahead)?;
    for step in 0..2 {
        model.backward(step)?;
        opt.step()?;
        opt.zero_grad()?;
    }
    ensure!(model.values() != before);
    Ok(())
}

/// What writes past autograd is not noticed until it is said.
pub fn weights_that_were_written_unnoticed_are_copied_when_that_is_said() -> Result<()> {
    let trained = |device: Device| -> Result<Vec<f32>> {
        let model = Model::new(device);
        let mut opt = CpuOffloadOptimizer::new(&model.params, adamw)?;
        for step in 0..3 {
            model.backward(step)?;
            opt.step()?;
            opt.zero_grad()?;
            let _ = model.params[0].data().fill_(0.25);
            opt.params_changed()?;
        }
        Ok(model.values())
    };
    let (found, expected) = (trained(GPU)?, trained(Device::Cpu)?);
    ensure!(is_close(&found, &expected), "{found:?} instead of {expected:?}");
    Ok(())
}

/// The copies were stepped, and are not stepped again with the same gradients.
pub fn a_step_whose_last_copies_fail_is_completed_by_the_next_call() -> Result<()> {
    let (fake, model) = (fake()?, Model::new(GPU));
    let mut opt = CpuOffloadOptimizer::new(&model.params, adamw)?;
    let expected = Model::new(Device::Cpu);
    let mut plain = adamw(expected.params.iter().map(|it| Parameter::unnamed(it.shallow_clone())).collect())?;
    for _ in 0..2 {
        [&model, &expected].into_iter().try_for_each(|it| it.backward(0))?;
        // Three gradients are copied to the host, then three parameters to the device.
        fake.fail("cudaMemcpyAsync", 5, 1);
        ensure!(opt.step().is_err());
        for _ in 0..2 {
            let told = opt.step().err().map(|error| error.to_string()).unwrap_or_default();
            ensure!(told.contains("last step's update is done"), "{told}");
        }
        plain.step()?;
        opt.zero_grad()?;
        plain.zero_grad()?;
    }
    ensure!(is_close(&model.values(), &expected.values()), "{:?}", model.values());
    // Weights that are loaded meanwhile are not overwritten.
    model.backward(0)?;
    fake.fail("cudaMemcpyAsync", 5, 1);
    ensure!(opt.step().is_err());
    tch::no_grad(|| model.params.iter().for_each(|param| _ = param.shallow_clone().fill_(0.5)));
    opt.zero_grad()?;
    opt.step()?;
    ensure!(model.values().iter().all(|value| *value == 0.5), "{:?}", model.values());
    Ok(())
}
