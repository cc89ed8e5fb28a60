//! Tests of training on a GPU. Without one, they run on a fake one; where libtorch has no CUDA code, each test prints
//! `skipped: no CUDA device` and counts as ignored.
#![forbid(unsafe_code)]

mod loading;
mod optimizers;
mod profiling;
mod ranks;

use anyhow::{Result, ensure};
use libtest_mimic::{Arguments, Failed, Trial};
use overdrive::amp::StepOutcome;
use overdrive::core::TorchErrorKind;
use overdrive::ffi::{self, Arg, Op, TensorList, cuda};
use overdrive::prelude::*;
use overdrive_fakecuda::Fake;
use tch::{Cuda, nn, nn::Module};

const GPU: Device = Device::Cuda(0);
const FLOAT: (Kind, Device) = (Kind::Float, GPU);

/// A fake device rounds as the host does.
const REAL_ONLY: [&str; 1] = ["tf32_changes_products_only_while_allowed"];

/// Tests with the names of their functions.
macro_rules! trials {
    ($($test:path),* $(,)?) => { vec![$((stringify!($test), $test as fn() -> Result<()>)),*] };
}

fn main() {
    if let Some(result) = ranks::main_if_told() {
        std::process::exit(i32::from(result.is_err()));
    }
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
    let is_fake = Fake::get().is_some();
    let tests = trials![
        libtorch_sees_the_device,
        autocast_casts_on_the_device,
        memory_is_counted_and_the_peak_can_be_reset,
        an_exhausted_device_is_out_of_memory,
        pinned_memory_is_pinned,
        tf32_changes_products_only_while_allowed,
        optimizers::fused_adamw_on_the_device_equals_the_host,
        optimizers::fused_sgd_on_the_device_equals_the_host,
        optimizers::every_optimizer_on_the_device_equals_the_host_and_never_waits,
        optimizers::eight_bit_averages_on_the_device_equal_the_hosts,
        optimizers::steps_in_backward_run_on_the_device,
        a_fused_scaled_step_never_waits_for_the_device,
        a_step_that_overflows_is_skipped_on_the_device,
        an_unfused_step_waits_once_to_read_the_flag,
        accumulation_equals_the_large_batch,
        float16_training_learns,
        loading::batches_from_pinned_memory_arrive_whole,
        loading::a_cache_on_the_device_holds_what_was_loaded,
        loading::later_epochs_ask_the_driver_for_nothing,
        loading::a_dataset_on_the_device_is_read_there,
        ranks::ddp_of_2_over_nccl_equals_gloos,
        ranks::ddp_of_4_over_nccl_equals_gloos,
        profiling::the_profiler_sees_the_device,
        profiling::phases_on_the_device_are_timed_without_waiting,
    ];
    let trials = tests.into_iter().map(|(name, test)| {
        let skip = skip || (is_fake && REAL_ONLY.contains(&name));
        if skip && !arguments.list {
            println!("{name}: skipped: {}", if is_fake { "only a real device can show it" } else { "no CUDA device" });
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
