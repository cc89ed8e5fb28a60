//! Collectives and training over NCCL, one rank per GPU, with up to two ranks. Not yet run on a GPU.

use anyhow::{Result, ensure};
use overdrive_ddp::{Backend, DistributedDataParallel, InitMethod, ProcessGroup, ReduceOp};
use tch::nn::{self, Module};
use tch::{Cuda, Device, Kind, Tensor};

use crate::harness::{Meeting, run};

/// Why these tests cannot run here.
pub fn missing() -> Option<String> {
    (!Cuda::is_available() || !overdrive_ddp::nccl_is_compiled()).then(|| "no CUDA device".to_owned())
}

fn ranks() -> usize {
    usize::try_from(Cuda::device_count()).unwrap_or(0).min(2)
}

pub fn sums_and_copies() -> Result<()> {
    run("nccl_collectives", ranks()).map(drop)
}

pub fn trains() -> Result<()> {
    run("nccl_training", ranks()).map(drop)
}

fn group(meeting: &Meeting, backend: Backend) -> Result<ProcessGroup> {
    Ok(ProcessGroup::builder(backend).cuda_device(meeting.rank).init(&InitMethod::Auto)?)
}

/// In a group of both backends, a tensor is sent by the backend for its device.
pub fn collectives(meeting: &Meeting) -> Result<()> {
    let group = group(meeting, Backend::GlooAndNccl)?;
    let size = group.size() as i64;
    for device in [Device::Cuda(meeting.rank), Device::Cpu] {
        let own = meeting.rank as i64 + 1;
        let mut sum = Tensor::from(own).to_device(device);
        group.all_reduce(&mut sum, ReduceOp::Sum)?;
        ensure!(sum.int64_value(&[]) == size * (size + 1) / 2, "{device:?}: {sum}");
        let mut first = Tensor::from(own).to_device(device);
        group.broadcast(&mut first, 0)?;
        ensure!(first.int64_value(&[]) == 1, "{device:?}: {first}");
        for (rank, one) in group.all_gather(&Tensor::from_slice(&[own]).to_device(device))?.iter().enumerate() {
            ensure!(one.int64_value(&[0]) == rank as i64 + 1 && one.device() == device, "{one}");
        }
    }
    Ok(group.barrier()?)
}

/// The averaged gradients of all ranks' parts equal those of the whole batch.
pub fn training(meeting: &Meeting) -> Result<()> {
    let group = group(meeting, Backend::Nccl)?;
    let device = Device::Cuda(meeting.rank);
    tch::manual_seed(1);
    let vs = nn::VarStore::new(device);
    let model = nn::linear(vs.root(), 16, 4, Default::default());
    let ddp = DistributedDataParallel::new(&vs, &group)?;
    let whole = Tensor::randn([8 * group.size() as i64, 16], (Kind::Float, Device::Cpu)).to_device(device);
    for _ in 0..5 {
        let part = whole.narrow(0, 8 * meeting.rank as i64, 8);
        let loss = ddp.forward(|| model.forward(&part))?.square().mean(Kind::Float);
        ddp.backward(&loss)?;
        let found: Vec<Tensor> = vs.trainable_variables().iter().map(|param| param.grad().copy()).collect();
        let alone = Tensor::f_run_backward(
            &[model.forward(&whole).square().mean(Kind::Float)],
            &vs.trainable_variables(),
            false,
            false,
        )?;
        for (found, expected) in found.iter().zip(&alone) {
            ensure!(found.allclose(expected, 1e-5, 1e-6, false), "{found} instead of {expected}");
        }
        for mut param in vs.trainable_variables() {
            tch::no_grad(|| drop(param.f_sub_(&(param.grad() * 0.1))));
            param.zero_grad();
        }
    }
    Ok(())
}
