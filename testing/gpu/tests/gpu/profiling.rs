//! The profiler and the timer of phases, on the device.

use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use overdrive::ffi::cuda;
use overdrive::prelude::*;
use overdrive_fakecuda::Fake;
use overdrive_profile::{
    DeviceType, GapSource, Monitor, Phase, Profiler, Sampler, SortBy, StepTimer, TableOptions, ThrottleReason,
};
use tch::Cuda;

use crate::{FLOAT, GPU, fake};

pub fn the_profiler_sees_the_device() -> Result<()> {
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

pub fn phases_on_the_device_are_timed_without_waiting() -> Result<()> {
    // Enough work for a real device; on a fake one a product takes as long as it is told, and the host computes it.
    let width = if Fake::get().is_some() { 16 } else { 1024 };
    if let Some(fake) = Fake::get() {
        fake.set_launch_cost(10.0);
    }
    let timer = StepTimer::builder().device(GPU).warmup_steps(1).build()?;
    let x = Tensor::randn([width, width], FLOAT);
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

/// A device that computes has plausible figures.
pub fn the_monitor_samples_a_real_device() -> Result<()> {
    let x = Tensor::randn([2048, 2048], FLOAT);
    let mut sampler = Sampler::new();
    let mut gpus = Vec::new();
    for second in 1..=3 {
        (0..200).for_each(|_| drop(x.matmul(&x)));
        let elapsed = Duration::from_secs(second);
        gpus = sampler.sample_at(elapsed, UNIX_EPOCH + elapsed).gpus;
        Cuda::synchronize(0);
    }
    let gpu = gpus.first().with_context(|| format!("no GPU was sampled: {:?}", sampler.gaps()))?;
    println!("{gpu:?}");
    ensure!(gpu.temperature_celsius.is_none_or(|it| (1.0..120.0).contains(&it)), "{gpu:?}");
    ensure!(gpu.power_watts.is_none_or(|it| (1.0..2000.0).contains(&it)), "{gpu:?}");
    ensure!(gpu.sm_clock_hertz.is_none_or(|it| (1e8..1e10).contains(&it)), "{gpu:?}");
    ensure!(gpu.utilization.is_none_or(|it| (0.0..=1.0).contains(&it)), "{gpu:?}");
    ensure!(gpu.temperature_celsius.is_some() || gpu.power_watts.is_some(), "nothing is known: {gpu:?}");
    Ok(())
}

/// NVML's figures in the monitor's units, by its own source of samples; one that the device does not have; and a device
/// that is lost, which is a gap.
pub fn the_monitor_samples_the_device() -> Result<()> {
    let fake = fake()?;
    // By NVML's header: `SwPowerCap` and `HwThermalSlowdown`.
    let reasons = 0x4 | 0x40;
    for (figure, value) in [
        ("temperature", 91),
        ("sm_clock", 1200),
        ("memory_clock", 1593),
        ("power", 350_000),
        ("utilization", 97),
        ("tensor_utilization", 40),
        ("throttle_reasons", reasons),
    ] {
        ensure!(fake.set_nvml(0, figure, value), "no figure {figure}");
    }
    let mut sampler = Sampler::new();
    let sample = |sampler: &mut Sampler, second| {
        let elapsed = Duration::from_secs(second);
        sampler.sample_at(elapsed, UNIX_EPOCH + elapsed).gpus
    };
    // The counters of tensor cores compare two samples.
    drop(sample(&mut sampler, 1));
    let gpus = sample(&mut sampler, 2);
    let gpu = gpus.first().context("no GPU was sampled")?;
    ensure!((gpu.temperature_celsius, gpu.power_watts) == (Some(91.0), Some(350.0)), "{gpu:?}");
    ensure!((gpu.sm_clock_hertz, gpu.memory_clock_hertz) == (Some(1.2e9), Some(1.593e9)), "{gpu:?}");
    ensure!((gpu.utilization, gpu.tensor_utilization) == (Some(0.97), Some(0.4)), "{gpu:?}");
    ensure!(gpu.throttle_reasons == [ThrottleReason::PowerCap, ThrottleReason::HardwareThermal], "{gpu:?}");
    ensure!(gpu.is_throttled() && gpu.name.contains("fake"), "{gpu:?}");

    const NOT_SUPPORTED: i64 = -3;
    ensure!(fake.set_nvml(0, "power", NOT_SUPPORTED));
    ensure!(sample(&mut sampler, 3).iter().map(|gpu| gpu.power_watts).eq([None]), "a power that is not there");
    ensure!(sampler.gaps().is_empty(), "{:?}", sampler.gaps());

    fake.lose(0, 0);
    ensure!(sample(&mut sampler, 4).is_empty(), "a lost device answers");
    fake.heal();
    ensure!(sample(&mut sampler, 5).len() == 1, "the device is back");
    let gaps = sampler.gaps();
    ensure!(gaps.len() == 1 && gaps[0].source == GapSource::Gpu(0), "{gaps:?}");
    ensure!((gaps[0].from_seconds, gaps[0].to_seconds) == (4.0, Some(5.0)), "{gaps:?}");
    ensure!(gaps[0].reason.starts_with("NVML"), "{gaps:?}");

    let mut monitor = Monitor::builder().interval(Duration::from_millis(10)).start()?;
    let latest = loop {
        match monitor.latest() {
            Some(sample) => break sample,
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    };
    monitor.stop();
    ensure!(latest.gpus.iter().map(|gpu| gpu.temperature_celsius).eq([Some(91.0)]), "{latest:?}");
    Ok(())
}
