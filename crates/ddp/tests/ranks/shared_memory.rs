//! Gradients that are averaged in memory of the host: the mean of an all-reduce, lost ranks, refusals.

use anyhow::{Context, Result, ensure};
use overdrive_ddp::hooks::SharedMemory;
use overdrive_ddp::{DdpError, DistributedDataParallel, ProcessGroup};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;
use crate::hooks::close;

/// More than it takes to rebuild the buckets, and both halves of the memory are used several times.
const STEPS: i64 = 7;

struct Training {
    vs: nn::VarStore,
    net: nn::Sequential,
    ddp: DistributedDataParallel,
}

impl Training {
    fn new(group: &ProcessGroup, kind: Kind, views: bool, hook: bool) -> Result<Self> {
        tch::manual_seed(1);
        let mut vs = nn::VarStore::new(Device::Cpu);
        let linear = |name, from, to| nn::linear(vs.root() / name, from, to, Default::default());
        let net = nn::seq().add(linear("a", 24, 33)).add_fn(Tensor::relu).add(linear("b", 33, 7));
        vs.set_kind(kind);
        let ddp =
            DistributedDataParallel::builder(group).bucket_cap_mb(0.002).gradient_as_bucket_view(views).build(&vs)?;
        if hook {
            ddp.register_comm_hook(SharedMemory::new(group)?)?;
        }
        Ok(Self { vs, net, ddp })
    }

    fn step(&self, group: &ProcessGroup, step: i64) -> Result<(), DdpError> {
        tch::manual_seed(100 * step + group.rank() as i64);
        let inputs = Tensor::randn([4, 24], (self.vs.trainable_variables()[0].kind(), Device::Cpu));
        let loss = self.ddp.forward(|| self.net.forward(&inputs))?.square().mean(inputs.kind());
        self.ddp.backward(&loss)?;
        tch::no_grad(|| {
            for mut param in self.vs.trainable_variables() {
                let mut grad = param.grad();
                let _ = param.g_sub_(&(&grad * 0.1));
                let _ = grad.zero_();
            }
        });
        Ok(())
    }

    fn params(&self) -> Vec<Tensor> {
        self.ddp.parameters().iter().map(|(_, param)| param.detach().copy()).collect()
    }
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16] {
        for views in [false, true] {
            let plain = Training::new(&group, kind, views, false)?;
            // Two at a time share nothing.
            let hooked = [(); 2].map(|()| Training::new(&group, kind, views, true));
            for step in 0..STEPS {
                plain.step(&group, step)?;
                for hooked in &hooked {
                    hooked.as_ref().map_err(|error| anyhow::anyhow!("{error:#}"))?.step(&group, step)?;
                }
            }
            for hooked in hooked {
                for (found, expected) in hooked?.params().iter().zip(plain.params()) {
                    let what = format!("{kind:?}, views: {views}");
                    if group.size() == 2 {
                        ensure!(found.equal(&expected), "{what}: not to the bit");
                    } else if kind != Kind::BFloat16 {
                        close(found, &expected.to_kind(Kind::Double), &what)?;
                    }
                }
            }
        }
    }
    Ok(group.close()?)
}

/// Rank 1 ends after some steps.
pub fn lost(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let training = Training::new(&group, Kind::Float, false, true)?;
    for step in 0..STEPS {
        training.step(&group, step)?;
    }
    if group.rank() == 1 {
        return Ok(());
    }
    let error = training.step(&group, STEPS).err().context("rank 1 has ended")?;
    ensure!(
        matches!(error, DdpError::Hook(_)) && error.to_string().contains("the connection to another rank failed"),
        "{error}"
    );
    Ok(())
}
