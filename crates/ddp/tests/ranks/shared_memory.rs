//! Gradients that are averaged in memory of the host: the mean of an all-reduce, lost ranks, refusals.

use anyhow::{Context, Result, ensure};
use overdrive_ddp::hooks::SharedMemory;
use overdrive_ddp::{DdpError, DistributedDataParallel, ProcessGroup};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;
use crate::hooks::close;

const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half];

/// More than it takes to rebuild the buckets, and both halves of the memory are used several times.
const STEPS: i64 = 7;

struct Training {
    vs: nn::VarStore,
    net: nn::Sequential,
    ddp: DistributedDataParallel,
}

fn net(kind: Kind) -> (nn::VarStore, nn::Sequential) {
    tch::manual_seed(1);
    let mut vs = nn::VarStore::new(Device::Cpu);
    let linear = |name, from, to| nn::linear(vs.root() / name, from, to, Default::default());
    let net = nn::seq().add(linear("a", 24, 33)).add_fn(Tensor::relu).add(linear("b", 33, 7));
    vs.set_kind(kind);
    (vs, net)
}

impl Training {
    fn new(group: &ProcessGroup, kind: Kind, views: bool, hook: bool) -> Result<Self> {
        let (vs, net) = net(kind);
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
    for kind in KINDS {
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
                    } else if matches!(kind, Kind::Float | Kind::Double) {
                        close(found, &expected.to_kind(Kind::Double), &what)?;
                    }
                }
            }
        }
    }
    Ok(group.close()?)
}

/// All ranks have the same gradients: their mean is a sum of so many shares, each rounded once.
pub fn divisions(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let ranks = group.size();
    for kind in KINDS {
        let (training, (vs, alone)) = (Training::new(&group, kind, false, true)?, net(kind));
        tch::manual_seed(2);
        let inputs = Tensor::randn([4, 24], (Kind::Float, Device::Cpu)).to_kind(kind);
        let loss = |net: &nn::Sequential| net.forward(&inputs).square().mean(kind);
        training.ddp.backward(&training.ddp.forward(|| loss(&training.net))?)?;
        loss(&alone).backward();
        for (found, grad) in training.vs.trainable_variables().iter().zip(vs.trainable_variables()) {
            // In a wider type, so that only the share is rounded.
            let wide = if kind == Kind::Double { Kind::Double } else { Kind::Float };
            let share = (grad.grad().to_kind(wide) * (1.0 / ranks as f64)).to_kind(kind);
            let mut mean = share.copy();
            for _ in 1..ranks {
                mean += &share;
            }
            ensure!(found.grad().equal(&mean), "{kind:?}: {} instead of {mean}", found.grad());
        }
    }
    Ok(group.close()?)
}

/// Rank 1 ends before the first pass, which makes the memory.
pub fn lost_at_first(meeting: &Meeting) -> Result<()> {
    lost_after(meeting, 0)
}

pub fn lost(meeting: &Meeting) -> Result<()> {
    lost_after(meeting, STEPS)
}

/// Rank 1 ends after so many steps.
fn lost_after(meeting: &Meeting, steps: i64) -> Result<()> {
    let group = meeting.group()?;
    let training = Training::new(&group, Kind::Float, false, true)?;
    for step in 0..steps {
        training.step(&group, step)?;
    }
    if group.rank() == 1 {
        return Ok(());
    }
    let error = training.step(&group, steps).err().context("rank 1 has ended")?;
    ensure!(
        matches!(error, DdpError::Hook(_)) && error.to_string().contains("the connection to another rank failed"),
        "{error}"
    );
    Ok(())
}
