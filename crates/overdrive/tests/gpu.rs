//! Tests of training on a GPU. Without one, they run on a fake one; where libtorch has no CUDA code, each test prints
//! `skipped: no CUDA device` and counts as ignored.

use anyhow::{Result, ensure};
use libtest_mimic::{Arguments, Failed, Trial};
use overdrive::amp::StepOutcome;
use overdrive::core::TorchErrorKind;
use overdrive::ffi::{self, Arg, Op, TensorList, cuda};
use overdrive::optim::{
    Adadelta, Adafactor, Adagrad, AdamW8Bit, Adamax, Asgd, Lamb, Lars, Lion, LowPrecision, Muon, NAdam, RAdam, RmsProp,
    Rprop,
};
use overdrive::prelude::*;
use overdrive_fakecuda::Fake;
use overdrive_profile::{DeviceType, Phase, Profiler, SortBy, StepTimer, TableOptions};
use tch::{Cuda, nn, nn::Module};

const GPU: Device = Device::Cuda(0);
const FLOAT: (Kind, Device) = (Kind::Float, GPU);

/// Tests with the names of their functions.
macro_rules! trials {
    ($($test:ident),* $(,)?) => { vec![$((stringify!($test), $test as fn() -> Result<()>)),*] };
}

fn main() {
    let runs = overdrive_fakecuda::start(1);
    if let Some(fake) = Fake::get()
        && let Err(error) = fake.compute()
    {
        eprintln!("{error}");
    }
    println!("on {runs}");
    let mut arguments = Arguments::from_args();
    // The tests share one device: memory statistics and `ForbidSync` apply to the whole process.
    arguments.test_threads = Some(1);
    let skip = !Cuda::is_available();
    let tests = trials![
        libtorch_sees_the_device,
        autocast_casts_on_the_device,
        memory_is_counted_and_the_peak_can_be_reset,
        an_exhausted_device_is_out_of_memory,
        pinned_memory_is_pinned,
        tf32_changes_products_only_while_allowed,
        fused_adamw_on_the_device_equals_the_host,
        fused_sgd_on_the_device_equals_the_host,
        every_optimizer_on_the_device_equals_the_host_and_never_waits,
        eight_bit_averages_on_the_device_equal_the_hosts,
        steps_in_backward_run_on_the_device,
        a_fused_scaled_step_never_waits_for_the_device,
        a_step_that_overflows_is_skipped_on_the_device,
        an_unfused_step_waits_once_to_read_the_flag,
        accumulation_equals_the_large_batch,
        float16_training_learns,
        the_profiler_sees_the_device,
        phases_on_the_device_are_timed_without_waiting,
    ];
    let trials = tests.into_iter().map(|(name, test)| {
        if skip && !arguments.list {
            println!("{name}: skipped: no CUDA device");
        }
        Trial::test(name, move || test().map_err(|error| Failed::from(format!("{error:#}")))).with_ignored_flag(skip)
    });
    libtest_mimic::run(&arguments, trials.collect()).exit();
}

fn libtorch_sees_the_device() -> Result<()> {
    ensure!(cuda::is_compiled(), "built without CUDA");
    ensure!(!cuda::device_name(0)?.is_empty());
    ensure!(cuda::device_name(Cuda::device_count() as usize).is_err(), "one device too many");
    Ok(())
}

fn autocast_casts_on_the_device() -> Result<()> {
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

fn memory_is_counted_and_the_peak_can_be_reset() -> Result<()> {
    const BYTES: i64 = 64 << 20;
    let before = cuda::memory_stats(0)?;
    let held = Tensor::zeros([BYTES], (Kind::Uint8, GPU));
    let during = cuda::memory_stats(0)?;
    ensure!(during.allocated_bytes >= before.allocated_bytes + BYTES);
    drop(held);
    ensure!(cuda::memory_stats(0)?.allocated_peak_bytes >= before.allocated_bytes + BYTES);
    cuda::reset_peak_memory_stats(0)?;
    ensure!(cuda::memory_stats(0)?.allocated_peak_bytes < before.allocated_bytes + BYTES);
    Ok(cuda::empty_cache()?)
}

fn an_exhausted_device_is_out_of_memory() -> Result<()> {
    let xs = TensorList::new(&[Tensor::zeros([1], FLOAT).expand([1 << 44], false)])?;
    let add = Op::find("aten::_foreach_add", "Scalar")?;
    match add.call(&[Arg::TensorList(&xs), Arg::Double(1.0)]) {
        Err(error) => ensure!(error.kind() == TorchErrorKind::OutOfMemory, "{:?}: {error}", error.kind()),
        Ok(_) => anyhow::bail!("64 TiB fit"),
    }
    let from_tch = match Tensor::f_zeros([1 << 44], FLOAT) {
        Err(error) => ffi::Error::from(error),
        Ok(_) => anyhow::bail!("64 TiB fit"),
    };
    ensure!(from_tch.kind() == TorchErrorKind::OutOfMemory, "{from_tch}");
    Ok(())
}

fn pinned_memory_is_pinned() -> Result<()> {
    let pinned = ffi::empty_pinned(&[128, 784], Kind::Uint8)?;
    ensure!(pinned.is_pinned(GPU) && pinned.size() == [128, 784]);
    ensure!(!Tensor::empty([128, 784], (Kind::Uint8, Device::Cpu)).is_pinned(GPU));
    Ok(())
}

fn tf32_changes_products_only_while_allowed() -> Result<()> {
    if Fake::get().is_some() {
        println!("tf32: only a real device rounds to TF32");
        return Ok(());
    }
    let before = ffi::context::matmul_allow_tf32()?;
    let (a, b) = (Tensor::randn([512, 512], FLOAT), Tensor::randn([512, 512], FLOAT));
    let exact = a.to_kind(Kind::Double).matmul(&b.to_kind(Kind::Double));
    let error = |allow| -> Result<f64> {
        ffi::context::set_matmul_allow_tf32(allow)?;
        Ok((a.matmul(&b).to_kind(Kind::Double) - &exact).abs().max().double_value(&[]))
    };
    let (with, without) = (error(true)?, error(false)?);
    ffi::context::set_matmul_allow_tf32(before)?;
    ensure!(with > 4.0 * without, "TF32 errs by {with:e}, float32 by {without:e}");
    Ok(())
}

/// The largest difference between host and device after 100 steps on the same gradients.
fn host_and_device(make: Make) -> Result<f64> {
    let start: Vec<_> = (1..6).map(|size| Tensor::randn([size, 7], (Kind::Float, Device::Cpu))).collect();
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

fn fused_adamw_on_the_device_equals_the_host() -> Result<()> {
    let difference =
        host_and_device(|params| Ok(Box::new(AdamW::builder(params).lr(1e-2).weight_decay(0.1).build()?)))?;
    ensure!(difference < 1e-5, "{difference:e}");
    Ok(())
}

fn fused_sgd_on_the_device_equals_the_host() -> Result<()> {
    let difference =
        host_and_device(|params| Ok(Box::new(Sgd::builder(params).lr(1e-2).momentum(0.9).nesterov(true).build()?)))?;
    ensure!(difference < 1e-5, "{difference:e}");
    Ok(())
}

type Make = fn(Vec<Tensor>) -> Result<Box<dyn Optimizer>>;

fn every_optimizer_on_the_device_equals_the_host_and_never_waits() -> Result<()> {
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
    let _forbid = cuda::ForbidSync::new()?;
    opt.step().map_err(|error| anyhow::anyhow!("{name}: {error}"))
}

fn eight_bit_averages_on_the_device_equal_the_hosts() -> Result<()> {
    let make: Make = |p| Ok(Box::new(AdamW8Bit::builder(p).min_8bit_size(1).build()?));
    let difference = host_and_device(make)?;
    ensure!(difference < 1e-3, "{difference:e}");
    never_waits("8-bit", make, Kind::Float)
}

fn steps_in_backward_run_on_the_device() -> Result<()> {
    let params = [Tensor::ones([4], FLOAT).set_requires_grad(true), Tensor::ones([4], FLOAT).set_requires_grad(true)];
    let mut opt = Sgd::builder(&params).lr(0.5).build_in_backward()?;
    (&params[0] * &params[1]).sum(Kind::Float).backward();
    opt.step()?;
    for param in &params {
        ensure!(!param.grad().defined() && param.double_value(&[0]) == 0.5);
    }
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

fn a_fused_scaled_step_never_waits_for_the_device() -> Result<()> {
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

fn a_step_that_overflows_is_skipped_on_the_device() -> Result<()> {
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

fn an_unfused_step_waits_once_to_read_the_flag() -> Result<()> {
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

fn accumulation_equals_the_large_batch() -> Result<()> {
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

fn float16_training_learns() -> Result<()> {
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

fn the_profiler_sees_the_device() -> Result<()> {
    let x = Tensor::randn([512, 512], FLOAT);
    let _ = x.matmul(&x);
    let mut profiler = Profiler::builder().profile_memory(true).with_flops(true).start()?;
    for _ in 0..3 {
        let _ = x.matmul(&x).relu();
    }
    let host = Tensor::randn([256, 256], (Kind::Float, Device::Cpu)).to_device(GPU);
    profiler.stop()?;
    drop(host);
    let profile = profiler.profile().ok_or_else(|| anyhow::anyhow!("nothing was recorded"))?;
    let averages = profile.key_averages(false)?;
    let product = averages.get("aten::mm").ok_or_else(|| anyhow::anyhow!("no product"))?;
    ensure!(product.count == 3 && product.self_device_time_total_ns > 0, "{product:?}");
    ensure!(product.device_memory_usage >= 3 * 512 * 512 * 4, "{product:?}");
    let copies =
        averages.iter().filter(|group| group.device_type == DeviceType::Cuda && group.key.starts_with("Memcpy"));
    ensure!(copies.count() > 0, "no copy");
    let table = averages.table(&TableOptions::sorted_by(SortBy::DeviceTimeTotal));
    ensure!(table.contains("Self CUDA %") && table.contains("CUDA Mem"), "{table}");

    // Each kernel is linked to the call that launched it, and the next recording may end while this one is written.
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("trace.json");
    let writer = profile.export_chrome_trace_in_background(&path)?;
    profiler.start()?;
    let _ = x.matmul(&x);
    profiler.stop()?;
    writer.wait()?;
    let text = std::fs::read_to_string(&path)?;
    for wanted in ["\"cat\": \"kernel\"", "\"cat\": \"cuda_runtime\"", "\"cat\": \"gpu_memcpy\"", "\"name\": \"ac2g\""]
    {
        ensure!(text.contains(wanted), "{wanted} is missing");
    }
    Ok(())
}

fn phases_on_the_device_are_timed_without_waiting() -> Result<()> {
    let timer = StepTimer::builder().device(GPU).warmup_steps(1).build()?;
    let x = Tensor::randn([1024, 1024], FLOAT);
    let _ = x.matmul(&x);
    {
        let _no_wait = cuda::ForbidSync::new()?;
        for _ in 0..4 {
            let forward = timer.phase(Phase::Forward);
            (0..20).for_each(|_| drop(x.matmul(&x)));
            drop(forward);
            timer.step(1);
        }
    }
    Cuda::synchronize(0);
    let device = timer.report().and_then(|report| report.device);
    let device = device.ok_or_else(|| anyhow::anyhow!("no times on the device"))?;
    ensure!((device.steps, device.lost_steps) == (3, 0), "{device:?}");
    let forward = device.phase(Phase::Forward).map_or(0.0, |phase| phase.share);
    ensure!(forward > 0.5, "{device:?}");
    Ok(())
}
