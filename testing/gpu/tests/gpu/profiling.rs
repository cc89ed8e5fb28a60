//! The profiler and the timer of phases, on the device.

use anyhow::{Result, ensure};
use overdrive::ffi::cuda;
use overdrive::prelude::*;
use overdrive_fakecuda::Fake;
use overdrive_profile::{DeviceType, Phase, Profiler, SortBy, StepTimer, TableOptions};
use tch::Cuda;

use crate::{FLOAT, GPU};

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
    if let Some(fake) = Fake::get() {
        fake.set_launch_cost(10.0);
    }
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
