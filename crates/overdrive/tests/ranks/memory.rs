//! Activation checkpointing and smaller batches under DDP.

use std::sync::Arc;

use anyhow::{Result, ensure};
use overdrive::ffi::host_memory;
use overdrive::memory::{ActivationCheckpoint, AutoMicroBatch, MemoryError, Policy};
use overdrive::prelude::*;
use overdrive_ddp::{DistributedDataParallel, ProcessGroup};

use crate::harness::Meeting;

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

#[derive(Module)]
struct Model {
    layers: nn::ModuleList<Arc<nn::Linear>>,
}

impl Model {
    fn new() -> Result<Self> {
        manual_seed(1);
        Ok(Self { layers: (0..3).map(|_| Ok(Arc::new(nn::Linear::new(8, 8)?))).collect::<Result<_>>()? })
    }

    fn loss(&self, x: &Tensor, policy: Option<&Policy>) -> Result<Tensor> {
        let mut x = x.shallow_clone();
        for layer in self.layers.iter() {
            let layer = Arc::clone(layer);
            let run = move |[x]: &[Tensor; 1]| layer.forward(x).map(|y| y.tanh().dropout(0.1, true));
            x = match policy {
                None => run(&[x])?,
                Some(policy) => ActivationCheckpoint::default().keep(policy.clone()).run(run, [&x])?,
            };
        }
        Ok(x.square().mean(Kind::Float))
    }

    fn weights(&self) -> Vec<Tensor> {
        self.named_parameters().iter().map(|it| it.tensor().detach().copy()).collect()
    }
}

/// Weights after steps of two micro-batches, each rank with its own samples.
fn train(group: &ProcessGroup, policy: Option<&Policy>) -> Result<Vec<Tensor>> {
    let model = Model::new()?;
    let mut opt = AdamW::builder(&model).lr(1e-2).build()?;
    let ddp = DistributedDataParallel::new(&model, group)?;
    let mut accum = Accumulator::new(2)?.with_sync(&ddp);
    manual_seed(7 + group.rank() as i64);
    let data: Vec<Tensor> = (0..6).map(|_| Tensor::randn([4, 8], FLOAT)).collect();
    for micro in accum.windows(&data) {
        let loss = ddp.forward(|| model.loss(micro.batch, policy))??;
        accum.backward(&opt, &loss, Samples(4), micro.closes)?;
        if micro.closes {
            opt.step()?;
            opt.zero_grad()?;
        }
    }
    Ok(model.weights())
}

/// To the bit.
pub fn checkpointed(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let expected = train(&group, None)?;
    for policy in [Policy::Nothing, Policy::Products] {
        ensure!(train(&group, Some(&policy))? == expected, "{policy:?}");
    }
    Ok(())
}

/// Rank 1 has room for a quarter of the batch: both ranks take quarters, and end as one process with all samples.
pub fn smaller(meeting: &Meeting) -> Result<()> {
    manual_seed(3);
    let all = Tensor::randn([2 * 64, 8], FLOAT);
    let wide = |x: &Tensor, weight: &Tensor| {
        x.f_matmul(weight)?.f_repeat([1, 2000])?.f_tanh()?.f_square()?.f_mean(Kind::Float)
    };
    let start = || {
        manual_seed(1);
        nn::Linear::builder(4, 8).bias(false).build()
    };

    let expected = start()?;
    let mut reference = Sgd::builder(&expected).lr(1.0).build()?;
    for _ in 0..3 {
        wide(&all, &expected.weight)?.f_backward()?;
        reference.step()?;
        reference.zero_grad()?;
    }

    let group = meeting.group()?;
    let model = start()?;
    let weight = &model.weight;
    let mut opt = Sgd::builder(&model).lr(1.0).build()?;
    let ddp = DistributedDataParallel::new(&model, &group)?;
    let mut micro = AutoMicroBatch::new(64).with_ranks(&ddp, &group);
    let own = all.narrow(0, 64 * group.rank() as i64, 64);
    host_memory::count(usize::MAX)?;
    if group.rank() == 1 {
        // A tensor of 16 samples has 512,000 bytes, and a pass some five of them.
        host_memory::count(usize::try_from(host_memory::stats()?.allocated)? + 4_000_000)?;
    }
    for _ in 0..3 {
        let loss = micro.backward(&mut opt, &[own.shallow_clone()], |part| wide(&part[0], weight))?;
        let part = |part: &Tensor| Ok(tch::no_grad(|| wide(part, weight))?.double_value(&[]));
        let whole = own.chunk(4, 0).iter().map(part).sum::<Result<f64>>()? / 4.0;
        ensure!((loss.double_value(&[]) - whole).abs() < 1e-5, "{loss:?} instead of {whole}");
        opt.step()?;
    }
    ensure!(micro.size() == 16, "{}", micro.size());
    ensure!(weight.allclose(&expected.weight, 1e-5, 1e-6, false), "{weight:?} instead of {:?}", expected.weight);

    // A rank that has no batch, or fails otherwise, ends both.
    let unequal = [own.shallow_clone(), own.narrow(0, 0, 1)];
    let bad = if group.rank() == 1 { &unequal[..] } else { &unequal[..1] };
    match (group.rank(), micro.backward(&mut opt, bad, |part| wide(&part[0], weight))) {
        (0, Err(MemoryError::OtherRank)) | (1, Err(MemoryError::Batch { .. })) => {}
        (rank, other) => anyhow::bail!("rank {rank}: {other:?}"),
    }
    let result = micro.backward(&mut opt, &[own], |part| {
        ensure!(group.rank() == 0, "no more data");
        Ok(wide(&part[0], weight)?)
    });
    match (group.rank(), result) {
        (0, Err(MemoryError::OtherRank)) => Ok(()),
        (1, Err(MemoryError::Function { source, .. })) if source.to_string() == "no more data" => Ok(()),
        (rank, other) => anyhow::bail!("rank {rank}: {other:?}"),
    }
}
