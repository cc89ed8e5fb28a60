//! An all-reduce inside of hosts and then between them: the mean of a flat one, refusals.

use anyhow::{Result, ensure};
use overdrive_ddp::hooks::HierarchicalAllReduce;
use overdrive_ddp::{DdpError, DistributedDataParallel, ProcessGroup};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;
use crate::hooks::{close, grads, mean, runs};

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    for ranks_per_host in [1, 2, 4] {
        let mut hook = HierarchicalAllReduce::new(&group, ranks_per_host)?;
        // Of a length that is a multiple of the ranks, and not.
        for count in [64, 37, 1] {
            let found = runs(&mut hook, &grads(group.rank(), 0, count), &[count])?;
            let all: Vec<Tensor> = (0..group.size()).map(|rank| grads(rank, 0, count)).collect();
            close(&found, &mean(&all), &format!("{ranks_per_host} ranks a host, {count} numbers"))?;
            // Sums of whole numbers are exact in any order.
            let whole = |rank: usize| (grads(rank, 1, count) * 100).round().to_kind(Kind::Float);
            let found = runs(&mut hook, &whole(group.rank()), &[count])?;
            let all: Vec<Tensor> = (0..group.size()).map(whole).collect();
            ensure!(found.equal(&mean(&all)), "{ranks_per_host} ranks a host, {count} whole numbers");
        }
    }
    for wrong in [0, 3, 8] {
        let error = HierarchicalAllReduce::new(&group, wrong).map(drop);
        ensure!(matches!(&error, Err(DdpError::InvalidOption { option: "ranks_per_host", .. })), "{error:?}");
    }
    trains(&group)
}

/// Several buckets, of which the steps between hosts overlap with the rest of backward.
fn trains(group: &ProcessGroup) -> Result<()> {
    let train = |hierarchical: bool| -> Result<Vec<Tensor>> {
        tch::manual_seed(1);
        let mut vs = nn::VarStore::new(Device::Cpu);
        let linear = |name, from, to| nn::linear(vs.root() / name, from, to, Default::default());
        let net = nn::seq().add(linear("a", 24, 33)).add_fn(Tensor::relu).add(linear("b", 33, 7));
        vs.double();
        let ddp = DistributedDataParallel::builder(group).bucket_cap_mb(0.002).build(&vs)?;
        if hierarchical {
            ddp.register_comm_hook(HierarchicalAllReduce::new(group, 2)?)?;
        }
        for step in 0..6 {
            tch::manual_seed(100 * step + group.rank() as i64);
            let inputs = Tensor::randn([4, 24], (Kind::Double, Device::Cpu));
            let loss = ddp.forward(|| net.forward(&inputs))?.square().mean(Kind::Double);
            ddp.backward(&loss)?;
            tch::no_grad(|| {
                for mut param in vs.trainable_variables() {
                    let _ = param.g_sub_(&(param.grad() * 0.1));
                    param.zero_grad();
                }
            });
        }
        Ok(ddp.parameters().iter().map(|(_, param)| param.detach().copy()).collect())
    };
    for (found, expected) in train(true)?.iter().zip(&train(false)?) {
        close(found, expected, "after six steps")?;
    }
    Ok(())
}
