//! Optimizers on the device.

use anyhow::{Result, ensure};
use overdrive::ffi::cuda;
use overdrive::optim::{
    Adadelta, Adafactor, Adagrad, AdamW8Bit, Adamax, Asgd, Lamb, Lars, Lion, LowPrecision, Muon, NAdam, RAdam, RmsProp,
    Rprop,
};
use overdrive::prelude::*;
use overdrive_fakecuda::{Fake, waits};

use crate::{FLOAT, GPU, fake};

/// The largest difference between host and device after 100 steps on the same gradients.
fn host_and_device(make: Make) -> Result<f64> {
    // Matrices and vectors: some algorithms step them together on a device.
    let sizes = (1..6).map(|size| vec![size, 7]).chain([vec![5], vec![1]]);
    let start: Vec<_> = sizes.map(|size| Tensor::randn(size, (Kind::Float, Device::Cpu))).collect();
    let copies = |device| -> Vec<Tensor> {
        start.iter().map(|start| start.to_device(device).copy().set_requires_grad(true)).collect()
    };
    let (host, device) = (copies(Device::Cpu), copies(GPU));
    let share = |params: &[Tensor]| params.iter().map(Tensor::shallow_clone).collect();
    let (mut host_opt, mut device_opt) = (make(share(&host))?, make(share(&device))?);
    for _ in 0..100 {
        for (host, device) in host.iter().zip(&device) {
            let grad = Tensor::randn_like(host);
            (host * &grad).sum(Kind::Float).backward();
            (device * grad.to_device(GPU)).sum(Kind::Float).backward();
        }
        host_opt.step()?;
        device_opt.step()?;
        host_opt.zero_grad()?;
        device_opt.zero_grad()?;
    }
    let differences =
        host.iter().zip(&device).map(|(a, b)| (a - b.to_device(Device::Cpu)).abs().max().double_value(&[]));
    Ok(differences.fold(0.0, f64::max))
}

pub fn fused_adamw_on_the_device_equals_the_host() -> Result<()> {
    let difference =
        host_and_device(|params| Ok(Box::new(AdamW::builder(params).lr(1e-2).weight_decay(0.1).build()?)))?;
    ensure!(difference < 1e-5, "{difference:e}");
    Ok(())
}

pub fn fused_sgd_on_the_device_equals_the_host() -> Result<()> {
    let difference =
        host_and_device(|params| Ok(Box::new(Sgd::builder(params).lr(1e-2).momentum(0.9).nesterov(true).build()?)))?;
    ensure!(difference < 1e-5, "{difference:e}");
    Ok(())
}

type Make = fn(Vec<Tensor>) -> Result<Box<dyn Optimizer>>;

pub fn every_optimizer_on_the_device_equals_the_host_and_never_waits() -> Result<()> {
    let all: [(&str, Make); 17] = [
        ("Adam", |p| Ok(Box::new(Adam::builder(p).lr(1e-2).amsgrad(true).build()?))),
        ("foreach AdamW", |p| Ok(Box::new(AdamW::builder(p).lr(1e-2).foreach(true).build()?))),
        ("capturable", |p| Ok(Box::new(AdamW::builder(p).lr(1e-2).foreach(true).capturable(true).build()?))),
        ("foreach SGD", |p| Ok(Box::new(Sgd::builder(p).lr(1e-2).momentum(0.9).foreach(true).build()?))),
        ("RMSprop", |p| Ok(Box::new(RmsProp::builder(p).centered(true).momentum(0.9).build()?))),
        ("Adagrad", |p| Ok(Box::new(Adagrad::builder(p).build()?))),
        ("Adadelta", |p| Ok(Box::new(Adadelta::builder(p).build()?))),
        ("Adamax", |p| Ok(Box::new(Adamax::builder(p).lr(1e-2).build()?))),
        ("ASGD", |p| Ok(Box::new(Asgd::builder(p).t0(1.0).build()?))),
        ("NAdam", |p| Ok(Box::new(NAdam::builder(p).lr(1e-2).build()?))),
        ("RAdam", |p| Ok(Box::new(RAdam::builder(p).lr(1e-2).build()?))),
        ("Rprop", |p| Ok(Box::new(Rprop::builder(p).build()?))),
        ("Adafactor", |p| Ok(Box::new(Adafactor::builder(p).build()?))),
        ("Lion", |p| Ok(Box::new(Lion::builder(p).lr(1e-3).build()?))),
        ("LAMB", |p| Ok(Box::new(Lamb::builder(p).lr(1e-2).build()?))),
        ("LARS", |p| Ok(Box::new(Lars::builder(p).build()?))),
        ("master copy", |p| Ok(Box::new(AdamW::builder(p).low_precision(LowPrecision::MasterCopy).build()?))),
    ];
    for (name, make) in all {
        let difference = host_and_device(make)?;
        ensure!(difference < 1e-3, "{name}: {difference:e}");
        never_waits(name, make, Kind::Float)?;
    }
    never_waits("Muon", |p| Ok(Box::new(Muon::builder(p).build()?)), Kind::Float)?;
    for precision in [LowPrecision::StochasticRounding, LowPrecision::MasterCopy] {
        let make = |p: Vec<Tensor>| -> Result<Box<dyn Optimizer>> {
            Ok(Box::new(AdamW::builder(p).low_precision(precision).build()?))
        };
        never_waits("bfloat16", make, Kind::BFloat16)?;
    }
    Ok(())
}

/// Checks the second step, because the first allocates the state.
fn never_waits(name: &str, make: impl Fn(Vec<Tensor>) -> Result<Box<dyn Optimizer>>, kind: Kind) -> Result<()> {
    let param = Tensor::randn([64, 64], FLOAT).to_kind(kind).set_requires_grad(true);
    let mut opt = make(vec![param.shallow_clone()])?;
    param.square().sum(kind).backward();
    opt.step()?;
    let fake = Fake::get().map(Fake::lend);
    if let Some(fake) = &fake {
        fake.reset();
        fake.trace_waits(true);
    }
    let forbid = cuda::ForbidSync::new()?;
    opt.step().map_err(|error| anyhow::anyhow!("{name}: {error}"))?;
    drop(forbid);
    // `ForbidSync` sees the waits of libtorch's own functions alone.
    if let Some(fake) = &fake {
        ensure!(waits(&fake.counts()) == 0, "{name} waits: {}", fake.waits());
    }
    Ok(())
}

pub fn eight_bit_averages_on_the_device_equal_the_hosts() -> Result<()> {
    let make: Make = |p| Ok(Box::new(AdamW8Bit::builder(p).min_8bit_size(1).build()?));
    let difference = host_and_device(make)?;
    ensure!(difference < 1e-3, "{difference:e}");
    never_waits("8-bit", make, Kind::Float)
}

pub fn steps_in_backward_run_on_the_device() -> Result<()> {
    let params = [Tensor::ones([4], FLOAT).set_requires_grad(true), Tensor::ones([4], FLOAT).set_requires_grad(true)];
    let mut opt = Sgd::builder(&params).lr(0.5).build_in_backward()?;
    (&params[0] * &params[1]).sum(Kind::Float).backward();
    opt.step()?;
    for param in &params {
        ensure!(!param.grad().defined() && param.double_value(&[0]) == 0.5);
    }
    Ok(())
}

/// Many parameters are updated by the same kernels as few.
pub fn an_eight_bit_step_launches_equally_often_for_more_parameters() -> Result<()> {
    let fake = fake()?;
    let launches = |params: usize| -> Result<u64> {
        let params: Vec<_> = (0..params).map(|_| Tensor::randn([70, 90], FLOAT).set_requires_grad(true)).collect();
        let mut opt = AdamW8Bit::builder(params.iter().map(Tensor::shallow_clone).collect::<Vec<_>>()).build()?;
        for param in &params {
            param.square().sum(Kind::Float).backward();
        }
        opt.step()?;
        fake.reset();
        opt.step()?;
        Ok(fake.counts().get("launches").copied().unwrap_or(0))
    };
    let (two, eight) = (launches(2)?, launches(8)?);
    ensure!(two > 0 && eight == two, "{two} for 2 parameters, {eight} for 8");
    Ok(())
}
