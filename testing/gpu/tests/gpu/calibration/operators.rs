//! What libtorch's operators ask of the device, by the profiler's records, which CUPTI or its stand-in gives.

use anyhow::{Context, Result};
use overdrive::ffi::{self, Arg, Op, TensorList};
use overdrive::prelude::*;
use overdrive_profile::{DeviceType, Profiler};

use super::Seen;
use crate::{FLOAT, GPU};

/// Kernels, copies and fills, and calls that wait for the device.
#[derive(Debug, Default, PartialEq)]
struct Work {
    kernels: usize,
    copies: Vec<String>,
    waits: usize,
}

/// What a function asks of the device, the second time: libraries and kernels are loaded then.
fn work<T>(mut function: impl FnMut() -> Result<T>) -> Result<Work> {
    function()?;
    tch::Cuda::synchronize(0);
    let mut profiler = Profiler::builder().start()?;
    let done = function();
    profiler.stop()?;
    drop(done?);
    let profile = profiler.profile().context("nothing was recorded")?;
    let mut work = Work::default();
    for event in profile.events()?.iter() {
        let is_transfer = event.name.starts_with("Memcpy") || event.name.starts_with("Memset");
        match event.device_type {
            DeviceType::Cuda if event.is_user_annotation => {}
            DeviceType::Cuda if is_transfer => work.copies.push(event.name.to_string()),
            DeviceType::Cuda => work.kernels += 1,
            // The profiler's own wait at its end is of the device.
            _ => work.waits += usize::from(event.name.starts_with("cudaStreamSynchronize")),
        }
    }
    Ok(work)
}

fn kernels(count: usize) -> Work {
    Work { kernels: count, ..Work::default() }
}

pub fn an_elementwise_operator_is_one_kernel() -> Result<()> {
    let mut seen = Seen::default();
    let x = Tensor::randn([64, 64], FLOAT);
    seen.value("add", work(|| Ok(x.f_add(&x)?))?, kernels(1));
    seen.value("relu", work(|| Ok(x.f_relu()?))?, kernels(1));
    seen.value("a view", work(|| Ok(x.f_transpose(0, 1)?))?, kernels(0));
    seen.value("softmax", work(|| Ok(x.f_softmax(-1, None::<Kind>)?))?, kernels(1));
    seen.value(
        "layer_norm",
        work(|| Ok(x.f_layer_norm([64], None::<&Tensor>, None::<&Tensor>, 1e-5, true)?))?,
        kernels(1),
    );
    seen.end()
}

pub fn a_list_of_tensors_is_one_kernel() -> Result<()> {
    let mut seen = Seen::default();
    let tensors: Vec<Tensor> = (0..10).map(|_| Tensor::randn([32], FLOAT)).collect();
    let (list, add) = (TensorList::new(&tensors)?, Op::find("aten::_foreach_add", "Scalar")?);
    let added = work(|| Ok(add.call(&[Arg::TensorList(&list), Arg::Double(1.0)])?))?;
    seen.value("_foreach_add of 10 tensors", added, kernels(1));
    let params: Vec<Tensor> = tensors.iter().map(|tensor| tensor.copy().set_requires_grad(true)).collect();
    let mut opt = AdamW::builder(params.iter().map(Tensor::shallow_clone).collect::<Vec<_>>()).build()?;
    params.iter().try_for_each(|param| param.sum(Kind::Float).f_backward())?;
    // Two kernels: the counters of steps, and the update.
    seen.value("a fused AdamW step of 10 tensors", work(|| Ok(opt.step()?))?, kernels(2));
    seen.end()
}

pub fn copies_say_where_from_and_who_waits() -> Result<()> {
    let mut seen = Seen::default();
    let copy = |name: &str, waits| Work { copies: vec![name.to_owned()], waits, ..Work::default() };
    let pageable = Tensor::randn([64, 64], (Kind::Float, Device::Cpu));
    let pinned = ffi::empty_pinned(&[64, 64], Kind::Float)?;
    let on_device = pageable.to_device(GPU);
    let up = |from: &Tensor, wait: bool| work(|| Ok(from.f_to_device_(GPU, Kind::Float, !wait, true)?));
    seen.value("from pageable memory", up(&pageable, true)?, copy("Memcpy HtoD (Pageable -> Device)", 1));
    seen.value("from pinned memory, not waiting", up(&pinned, false)?, copy("Memcpy HtoD (Pinned -> Device)", 0));
    seen.value("from pinned memory", up(&pinned, true)?, copy("Memcpy HtoD (Pinned -> Device)", 1));
    let down = work(|| Ok(on_device.f_to_device_(Device::Cpu, Kind::Float, false, true)?))?;
    seen.value("to the host", down, copy("Memcpy DtoH (Device -> Pageable)", 1));
    let number = on_device.get(0).get(0);
    let item = work(|| Ok(number.f_double_value(&[])?))?;
    seen.value("item", (item.copies.len(), item.waits), (1, 1));
    seen.end()
}

pub fn freed_memory_is_used_again() -> Result<()> {
    let mut seen = Seen::default();
    drop(Tensor::zeros([1 << 20], FLOAT));
    let before = ffi::cuda::memory_stats(0)?.reserved_bytes;
    for _ in 0..10 {
        drop(Tensor::zeros([1 << 20], FLOAT));
    }
    seen.value("memory of the driver", ffi::cuda::memory_stats(0)?.reserved_bytes, before);
    seen.end()
}
