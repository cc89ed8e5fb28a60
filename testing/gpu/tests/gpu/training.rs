//! Training: autocast, the scaler, accumulation.

use anyhow::{Result, ensure};
use overdrive::amp::StepOutcome;
use overdrive::ffi::cuda;
use overdrive::prelude::*;
use tch::nn::{self, Module};

use crate::{FLOAT, GPU};

pub fn autocast_casts_on_the_device() -> Result<()> {
    let x = Tensor::randn([32, 32], FLOAT);
    for kind in [Kind::Half, Kind::BFloat16] {
        let (product, sum) = autocast(GPU, kind, || (x.matmul(&x), x.softmax(-1, None::<Kind>)))?;
        ensure!(product.kind() == kind && sum.kind() == Kind::Float);
        let on_host = autocast(Device::Cpu, kind, || x.matmul(&x))?;
        ensure!(on_host.kind() == Kind::Float, "a region for the host casts nothing on the device");
    }
    let outer = AutocastGuard::new(GPU, Kind::Half)?;
    Autocast::new(GPU).enabled(false).run(|| assert_eq!(x.matmul(&x).kind(), Kind::Float))?;
    drop(outer);
    Ok(())
}

struct Setup {
    model: nn::Linear,
    opt: AdamW,
    scaler: GradScaler,
    inputs: Tensor,
}

fn setup() -> Result<Setup> {
    let vs = nn::VarStore::new(GPU);
    let model = nn::linear(vs.root(), 64, 64, Default::default());
    let opt = AdamW::builder(vs.trainable_variables()).build()?;
    Ok(Setup { model, opt, scaler: GradScaler::new(GPU), inputs: Tensor::randn([32, 64], FLOAT) })
}

impl Setup {
    fn backward(&mut self, factor: f64) -> Result<()> {
        let loss =
            autocast(GPU, Kind::Half, || (self.model.forward(&self.inputs).square() * factor).mean(Kind::Float))?;
        self.scaler.scale(&loss)?.backward();
        Ok(())
    }
}

pub fn a_fused_scaled_step_never_waits_for_the_device() -> Result<()> {
    let mut s = setup()?;
    let mut round = || -> Result<StepOutcome> {
        s.backward(1.0)?;
        let outcome = s.scaler.step(&mut s.opt)?;
        s.scaler.update()?;
        s.opt.zero_grad()?;
        Ok(outcome)
    };
    round()?; // the first step allocates the state
    let forbid = cuda::ForbidSync::new()?;
    let outcome = round()?;
    ensure!(outcome.skipped().is_err(), "reading the flag waits, so `ForbidSync` itself works");
    drop(forbid);
    ensure!(!outcome.skipped()?);
    Ok(())
}

pub fn a_step_that_overflows_is_skipped_on_the_device() -> Result<()> {
    let mut s = setup()?;
    s.backward(1.0)?;
    s.scaler.step(&mut s.opt)?;
    s.scaler.update()?;
    s.opt.zero_grad()?;
    let before: Vec<_> = s.opt.params().iter().map(Tensor::copy).collect();
    s.backward(f64::INFINITY)?;
    ensure!(s.scaler.step(&mut s.opt)?.skipped()?);
    s.scaler.update()?;
    ensure!(before.iter().zip(s.opt.params()).all(|(before, now)| before.equal(&now)), "the step changed something");
    ensure!(s.scaler.scale_value()? == 32768.0);
    Ok(())
}

pub fn an_unfused_step_waits_once_to_read_the_flag() -> Result<()> {
    use tch::nn::OptimizerConfig;
    let vs = nn::VarStore::new(GPU);
    let model = nn::linear(vs.root(), 64, 64, Default::default());
    let mut opt = TchOptimizer::new(nn::AdamW::default().build(&vs, 1e-3)?);
    let mut scaler = GradScaler::new(GPU);
    let inputs = Tensor::randn([32, 64], FLOAT);
    let loss = autocast(GPU, Kind::Half, || model.forward(&inputs).square().mean(Kind::Float))?;
    scaler.scale(&loss)?.backward();
    let forbid = cuda::ForbidSync::new()?;
    scaler.unscale_(&mut opt)?;
    ensure!(scaler.step(&mut opt).is_err(), "the flag cannot be read without waiting");
    drop(forbid);
    ensure!(!scaler.step(&mut opt)?.skipped()?);
    Ok(scaler.update()?)
}

pub fn accumulation_equals_the_large_batch() -> Result<()> {
    let vs = nn::VarStore::new(GPU);
    let model = nn::linear(vs.root(), 16, 4, Default::default());
    let data = Tensor::randn([23, 16], FLOAT);
    let loss = |x: &Tensor| model.forward(x).square().mean(Kind::Float);
    loss(&data).backward();
    let expected: Vec<_> = vs.trainable_variables().iter().map(|param| param.grad().copy()).collect();
    for mut param in vs.trainable_variables() {
        param.zero_grad();
    }
    let opt = Sgd::builder(&vs).build()?;
    let mut accum = Accumulator::new(3)?;
    for micro in accum.windows(data.split(9, 0)) {
        accum.backward(&opt, &loss(&micro.batch), Samples(micro.batch.size()[0]), micro.closes)?;
    }
    for (param, expected) in vs.trainable_variables().iter().zip(expected) {
        ensure!(param.grad().allclose(&expected, 1e-5, 1e-6, false));
    }
    Ok(())
}

pub fn float16_training_learns() -> Result<()> {
    let mut s = setup()?;
    s.opt.set_lr(0, 1e-2)?;
    let target = Tensor::randn([32, 64], FLOAT);
    let mut losses = Vec::new();
    for _ in 0..200 {
        let loss = autocast(GPU, Kind::Half, || s.model.forward(&s.inputs).mse_loss(&target, tch::Reduction::Mean))?;
        s.scaler.scale(&loss)?.backward();
        s.scaler.step(&mut s.opt)?;
        s.scaler.update()?;
        s.opt.zero_grad()?;
        losses.push(loss.double_value(&[]));
    }
    ensure!(losses[199] < losses[0] / 4.0, "from {} to {}", losses[0], losses[199]);
    Ok(())
}
