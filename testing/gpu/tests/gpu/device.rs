//! The device itself: what libtorch tells of it, its memory, and its products.

use anyhow::{Result, ensure};
use overdrive::core::TorchErrorKind;
use overdrive::ffi::{self, Arg, Op, TensorList, cuda};
use overdrive::prelude::*;
use tch::Cuda;

use crate::{FLOAT, GPU};

pub fn libtorch_sees_the_device() -> Result<()> {
    ensure!(cuda::is_compiled(), "built without CUDA");
    ensure!(!cuda::device_name(0)?.is_empty());
    ensure!(cuda::device_name(Cuda::device_count() as usize).is_err(), "one device too many");
    let (major, minor) = cuda::device_capability(0)?;
    ensure!(major >= 5 && (0..10).contains(&minor), "{major}.{minor} is no capability that libtorch runs on");
    ensure!(cuda::device_capability(Cuda::device_count() as usize).is_err(), "one device too many");
    Ok(())
}

pub fn memory_is_counted_and_the_peak_can_be_reset() -> Result<()> {
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

pub fn an_exhausted_device_is_out_of_memory() -> Result<()> {
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

pub fn pinned_memory_is_pinned() -> Result<()> {
    let pinned = ffi::empty_pinned(&[128, 784], Kind::Uint8)?;
    ensure!(pinned.is_pinned(GPU) && pinned.size() == [128, 784]);
    ensure!(!Tensor::empty([128, 784], (Kind::Uint8, Device::Cpu)).is_pinned(GPU));
    Ok(())
}

pub fn tf32_changes_products_only_while_allowed() -> Result<()> {
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
