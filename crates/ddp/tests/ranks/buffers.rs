//! A hook for buffers in place of the broadcast of rank 0's.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use anyhow::{Result, ensure};
use overdrive_ddp::{BufferHookLocation, DdpError, DistributedDataParallel, ReduceOp};
use tch::nn::{self, ModuleT};
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    for location in [BufferHookLocation::PreForward, BufferHookLocation::PostForward] {
        tch::manual_seed(1);
        let vs = nn::VarStore::new(Device::Cpu);
        let norm = nn::batch_norm1d(vs.root() / "norm", 3, Default::default());
        let ddp = DistributedDataParallel::new(&vs, &group)?;
        let (calls, fails) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let hook = {
            let (calls, fails, group) = (calls.clone(), fails.clone(), group.clone());
            move |buffers: &[(String, Tensor)]| {
                calls.fetch_add(1, Relaxed);
                if fails.load(Relaxed) {
                    return Err(DdpError::NoParameters);
                }
                // `num_batches_tracked` is a whole number in PyTorch's modules.
                for (_, buffer) in buffers.iter().filter(|(_, buffer)| buffer.is_floating_point()) {
                    group.all_reduce(&mut buffer.shallow_clone(), ReduceOp::Avg)?;
                }
                Ok(())
            }
        };
        ddp.register_buffer_comm_hook(location, hook)?;
        let forward = || {
            let inputs = Tensor::full([4, 3], 1.0 + group.rank() as f64, (Kind::Float, Device::Cpu));
            let inputs = inputs + Tensor::randn([4, 3], (Kind::Float, Device::Cpu)) * 1e-3;
            ddp.forward(|| norm.forward_t(&inputs, true))
        };
        let step = || -> Result<()> { Ok(ddp.backward(&forward()?.square().sum(Kind::Float))?) };
        (0..4).try_for_each(|_| step())?;
        ensure!(calls.load(Relaxed) == 4, "{location:?}: called {} times", calls.load(Relaxed));
        // The means of this rank's batches are 1 or 2. After the forward pass they have just been averaged.
        let mean = vs.variables()["norm.running_mean"].mean(Kind::Double);
        let all: Vec<f64> = group.all_gather(&mean)?.iter().map(|mean| mean.double_value(&[])).collect();
        let (spread, centre) = ((all[0] - all[1]).abs(), (all[0] + all[1]) / 2.0);
        let expected = if location == BufferHookLocation::PostForward { 0.0 } else { 0.1 };
        ensure!((spread - expected).abs() < 1e-3, "{location:?}: {all:?}");
        // Momentum 0.1 four times towards 1.5.
        ensure!((centre - 1.5 * (1.0 - 0.9f64.powi(4))).abs() < 1e-3, "{location:?}: {all:?}");
        // Its errors are the forward pass's, and it is called again.
        fails.store(true, Relaxed);
        ensure!(matches!(forward(), Err(DdpError::NoParameters)));
        fails.store(false, Relaxed);
        step()?;
        ensure!(calls.load(Relaxed) == 6, "{location:?}: called {} times", calls.load(Relaxed));
        let refused = ddp.join(false, || ());
        ensure!(
            matches!(&refused, Err(DdpError::Unsupported { op: "join", reason }) if reason.contains("buffer hook"))
        );
    }
    Ok(())
}
