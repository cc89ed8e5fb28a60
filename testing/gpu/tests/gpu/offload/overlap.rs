//! Parameters that are copied to the device beside the forward pass.

use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::{Result, ensure};
use overdrive::core::{Entry, OptimizerError, Parameter, StateDict};
use overdrive::ffi::{TimedEvent, storage};
use overdrive::memory::CpuOffloadOptimizer;
use overdrive::nn::{load_safetensors, save_safetensors};
use overdrive::prelude::*;
use overdrive_fakecuda::{Fake, waits};

use super::{asks_for_nothing, count, each_forgotten_wait_is_found};
use crate::loading::{paces, watched};
use crate::{FLOAT, GPU, fake};

const SIDE: i64 = 64;
const BYTES: u64 = (SIDE * SIDE * 4) as u64;
const LAYERS: usize = 6;

type Offloaded = CpuOffloadOptimizer<Sgd>;

/// Its updates differ as little as gradients do: a device rounds otherwise.
fn sgd(params: Vec<Parameter>) -> Result<Sgd, OptimizerError> {
    Sgd::builder(params).lr(0.1).momentum(0.9).weight_decay(0.1).build()
}

/// Layers that are used in another order than that of the parameters: one by a view from before, two in a list, and two
/// that are parts of one memory. The last parameter is not used.
struct Layers {
    params: Vec<Tensor>,
    view: Tensor,
    input: Tensor,
}

impl Layers {
    fn new(device: Device) -> Self {
        let number = |of: usize, sides: i64| {
            let numbers = Tensor::arange(sides * SIDE * SIDE, (Kind::Float, Device::Cpu)) * (of + 1) as i64;
            (numbers.sin() / 8.0).view([sides * SIDE, SIDE]).to_device(device)
        };
        let both = number(LAYERS, 2);
        let alone = (0..LAYERS - 1).map(|of| number(of, 1));
        let params = alone.chain([both.narrow(0, 0, SIDE), both.narrow(0, SIDE, SIDE)]);
        let params: Vec<_> = params.map(|it| it.detach().set_requires_grad(true)).collect();
        let view = tch::no_grad(|| params[1].detach());
        Self { params, view, input: number(17, 1) }
    }

    fn forward(&self) -> Tensor {
        let [a, b, c, d, e, f, _unused] = &self.params[..] else { unreachable!("there are seven") };
        let x = self.input.matmul(f).tanh().matmul(d).tanh() + &self.view;
        let x = x.matmul(&Tensor::cat(&[c, e], 1)).tanh();
        (x.narrow(1, 0, SIDE) * b).matmul(a).square().mean(Kind::Float)
    }

    fn values(&self) -> Vec<f32> {
        let flat = |it: &Tensor| Vec::<f32>::try_from(it.detach().view([-1]).to_device(Device::Cpu));
        self.params.iter().flat_map(|it| flat(it).unwrap_or_default()).collect()
    }
}

/// Also reads the weights on the host between two steps, as an evaluation or a checkpoint does.
fn train(layers: &Layers, opt: &mut dyn Optimizer) -> Result<Vec<f32>> {
    let mut seen = Vec::new();
    for step in 0..4 {
        layers.forward().f_backward()?;
        opt.step()?;
        opt.zero_grad()?;
        if step == 2 {
            seen = layers.values();
        }
    }
    Ok(seen)
}

fn expected() -> Result<Vec<f32>> {
    let layers = Layers::new(Device::Cpu);
    let params = layers.params.iter().map(|it| Parameter::unnamed(it.shallow_clone())).collect();
    let seen = train(&layers, &mut sgd(params)?)?;
    Ok([seen, layers.values()].concat())
}

fn overlapped(frees: bool) -> Result<Vec<f32>> {
    let layers = Layers::new(GPU);
    let mut opt = match frees {
        false => Offloaded::new(&layers.params, sgd)?,
        true => Offloaded::with_offloaded_gradients(&layers.params, sgd)?,
    }
    .overlap_forward();
    let seen = train(&layers, &mut opt)?;
    // While copies may be under way.
    drop(opt);
    Ok([seen, layers.values()].concat())
}

fn is_close(found: &[f32], expected: &[f32]) -> bool {
    let bound = if Fake::get().is_some() { 0.0 } else { 1e-3 };
    found.len() == expected.len() && found.iter().zip(expected).all(|(one, other)| (one - other).abs() <= bound)
}

pub fn a_parameter_is_never_used_before_its_copy() -> Result<()> {
    let expected = expected()?;
    for frees in [false, true] {
        for pace in paces(50) {
            let (found, notes) = watched(pace, || overlapped(frees))?;
            ensure!(notes.is_empty(), "{frees}, {pace:?}: {}", notes.join("; "));
            ensure!(is_close(&found?, &expected), "{frees}, {pace:?}");
        }
    }
    Ok(())
}

pub fn a_forgotten_wait_for_a_parameter_is_found() -> Result<()> {
    each_forgotten_wait_is_found(|| overlapped(false).map(drop))
}

/// Layers of which each has one weight.
fn chain(weights: &[Tensor]) -> Tensor {
    let first = Tensor::ones([SIDE, SIDE], FLOAT);
    weights.iter().fold(first, |x, weight| x * weight)
}

pub fn a_layer_waits_for_its_own_parameters_alone() -> Result<()> {
    let fake = fake()?.lend();
    let weights: Vec<_> = (0..LAYERS).map(|_| Tensor::ones([SIDE, SIDE], FLOAT).set_requires_grad(true)).collect();
    // In the order in which they are used, which is learnt.
    let reversed: Vec<_> = weights.iter().rev().map(Tensor::shallow_clone).collect();
    let mut opt = Offloaded::new(&reversed, sgd)?.overlap_forward();
    for _ in 0..2 {
        chain(&weights).sum(Kind::Float).f_backward()?;
        opt.step()?;
        opt.zero_grad()?;
    }
    let waited = || count(&fake.counts(), "waits of streams for events");
    fake.reset();
    let mut x = Tensor::ones([SIDE, SIDE], FLOAT);
    for (at, weight) in weights.iter().enumerate() {
        for _ in 0..2 {
            x = x.f_mul(weight)?;
            ensure!(waited() == at as u64 + 1, "{} waits in layer {at}", waited());
        }
    }
    // The step itself adds none but those of the copies for the computation.
    x.sum(Kind::Float).f_backward()?;
    fake.reset();
    fake.trace_waits(true);
    opt.step()?;
    let counts = fake.counts();
    ensure!(waits(&counts) == 1 && asks_for_nothing(&counts), "{} {counts:?}", fake.waits());
    ensure!(waited() <= 3 * LAYERS as u64, "{}", waited());
    ensure!(count(&counts, "bytes host to device, pinned") == LAYERS as u64 * BYTES, "{counts:?}");
    Ok(())
}

/// By the device's clock: a copy takes 0.3 us, a layer 1 us.
pub fn copies_run_beside_the_layers() -> Result<()> {
    let fake = fake()?.lend();
    fake.set_launch_cost(1.0);
    let time = |overlaps: bool| -> Result<f64> {
        let weights: Vec<_> = (0..LAYERS).map(|_| Tensor::ones([SIDE, SIDE], FLOAT).set_requires_grad(true)).collect();
        let opt = Offloaded::new(&weights, sgd)?;
        let mut opt = if overlaps { opt.overlap_forward() } else { opt };
        for _ in 0..2 {
            chain(&weights).sum(Kind::Float).f_backward()?;
            opt.step()?;
            opt.zero_grad()?;
        }
        let (mut begin, mut end) = (TimedEvent::new(0)?, TimedEvent::new(0)?);
        chain(&weights).sum(Kind::Float).f_backward()?;
        // The step's copies begin behind this.
        begin.record()?;
        opt.step()?;
        let x = chain(&weights);
        end.record()?;
        drop(x.to_device(Device::Cpu));
        Ok(begin.milliseconds_to(&end)? * 1e3)
    };
    let copy = BYTES as f64 / 50.0 / 1e3;
    let (plain, overlapped) = (time(false)?, time(true)?);
    let saved = plain - overlapped;
    // The first one runs beside the kernel that makes the input.
    let expected = LAYERS as f64 * copy;
    ensure!((saved - expected).abs() < 0.1 * copy, "{plain} us, {overlapped} us: {expected} expected less");
    Ok(())
}

/// What no operator tells of.
pub fn an_access_past_the_operators_is_an_error_until_it_waits() -> Result<()> {
    let layers = Layers::new(GPU);
    let mut opt = Offloaded::new(&layers.params, sgd)?.overlap_forward();
    let told = || {
        let caught = catch_unwind(AssertUnwindSafe(|| layers.params[0].data_ptr()));
        caught.err().map(|panic| panic.downcast_ref::<String>().cloned().unwrap_or_default())
    };
    for _ in 0..2 {
        layers.forward().f_backward()?;
        opt.step()?;
        let message = told();
        ensure!(message.as_ref().is_some_and(|it| it.contains("call `wait_for_copies`")), "{message:?}");
        opt.wait_for_copies()?;
        ensure!(told().is_none());
        opt.step()?;
        // This crate's own functions wait.
        ensure!(storage(&layers.params[0])?.bytes as u64 == BYTES && told().is_none());
        drop(layers.values());
    }
    opt.step()?;
    drop(opt);
    ensure!(told().is_none(), "an optimizer that is gone waits for nothing");
    Ok(())
}

/// A checkpoint is saved and another optimizer is built right after a step, though no operator has come before.
pub fn weights_are_saved_and_optimizers_are_built_while_copies_are_under_way() -> Result<()> {
    let (layers, expected) = (Layers::new(GPU), Layers::new(Device::Cpu));
    let mut opt = Offloaded::new(&layers.params, sgd)?.overlap_forward();
    let mut plain = sgd(expected.params.iter().map(|it| Parameter::unnamed(it.shallow_clone())).collect())?;
    layers.forward().f_backward()?;
    expected.forward().f_backward()?;
    opt.step()?;
    plain.step()?;
    let _other = sgd(layers.params.iter().map(|it| Parameter::unnamed(it.shallow_clone())).collect())?;
    let mut state = StateDict::new();
    for (at, param) in layers.params.iter().enumerate() {
        state.insert(at.to_string(), Entry::Tensor(param.shallow_clone()));
    }
    let (folder, names) = (tempfile::tempdir()?, (0..layers.params.len()).map(|at| at.to_string()));
    let path = folder.path().join("model.safetensors");
    save_safetensors(&path, &state, &[])?;
    let saved = load_safetensors(&path)?;
    let flat = |it: &Tensor| -> Result<Vec<f32>> { Ok(Vec::<f32>::try_from(it.reshape([-1]))?) };
    let mut values = Vec::new();
    for name in names {
        let Entry::Tensor(tensor) = saved.get(&name)? else { anyhow::bail!("{name} is no tensor") };
        values.extend(flat(tensor)?);
    }
    ensure!(is_close(&values, &expected.values()), "what was saved are the new values");
    Ok(())
}

/// The masters were stepped, and are not stepped again with the same gradients.
pub fn a_step_whose_overlapping_copies_fail_is_completed_by_the_next_call() -> Result<()> {
    let (fake, layers, expected) = (fake()?, Layers::new(GPU), Layers::new(Device::Cpu));
    let mut opt = Offloaded::new(&layers.params, sgd)?.overlap_forward();
    let mut plain = sgd(expected.params.iter().map(|it| Parameter::unnamed(it.shallow_clone())).collect())?;
    for _ in 0..2 {
        [&layers, &expected].into_iter().try_for_each(|it| it.forward().f_backward())?;
        // Six gradients are copied to the host, then seven parameters to the device.
        fake.fail("cudaMemcpyAsync", 6 + 4, 1);
        ensure!(opt.step().is_err());
        let told = opt.step().err().map(|error| error.to_string()).unwrap_or_default();
        ensure!(told.contains("last step's update is done"), "{told}");
        plain.step()?;
        opt.zero_grad()?;
        plain.zero_grad()?;
    }
    ensure!(is_close(&layers.values(), &expected.values()));
    Ok(())
}
