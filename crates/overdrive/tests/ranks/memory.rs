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
    // A panic of one rank is an error of the other, which does not wait for it.
    let mut panics = || {
        micro.backward(&mut opt, &[own.shallow_clone()], |part| match group.rank() {
            0 => wide(&part[0], weight),
            _ => panic!("planted"),
        })
    };
    match (group.rank(), std::panic::catch_unwind(std::panic::AssertUnwindSafe(&mut panics))) {
        (0, Ok(Err(MemoryError::OtherRank))) | (1, Err(_)) => {}
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

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

/// The sizes of a rank's batches: the last ones of epochs differ.
const SIZES: [[i64; 8]; 2] = [[12, 12, 5, 12, 12, 12, 3, 12], [12, 12, 9, 12, 12, 12, 1, 12]];

/// Rows of a number in the dataset, and whether each counts.
fn rows(rank: usize, step: usize) -> Tensor {
    let size = SIZES[rank][step];
    manual_seed(100 * step as i64 + rank as i64);
    let x = Tensor::randn([size, 8], DOUBLE);
    let ids = (Tensor::arange(size, DOUBLE) + (1000 * step + 100 * rank) as f64).unsqueeze(1);
    // In one step no row of rank 1 counts.
    let counts = (Tensor::arange(size, DOUBLE) + step as i64).remainder(3.0).clamp_max(1.0).unsqueeze(1);
    let counts = if (rank, step) == (1, 4) { counts.zeros_like() } else { counts };
    Tensor::cat(&[ids, counts, x], 1)
}

/// The mean over the rows that count, or over all, of something that takes much memory.
fn mean(rows: &Tensor, weight: &Tensor, is_weighted: bool) -> Result<Tensor, tch::TchError> {
    let x = rows.f_narrow(1, 2, 8)?;
    let each = x.f_matmul(&weight.tr())?.f_repeat([1, 500])?.f_tanh()?.f_square()?;
    let each = each.f_mean_dim([1].as_slice(), false, Kind::Double)?;
    let counts = rows.f_select(1, 1)?;
    let counts = if is_weighted { counts } else { counts.f_ones_like()? };
    each.f_mul(&counts)?.f_sum(Kind::Double)?.f_div(&counts.f_sum(Kind::Double)?)
}

/// Batches of unequal sizes, of which rank 1 has little memory for the first ones: the ranks shrink and grow together, each
/// sample counts once, and the weights are those of one process with the samples of both.
fn unequal_by(group: &ProcessGroup, is_weighted: bool) -> Result<()> {
    let start = || -> Result<nn::Linear> {
        manual_seed(1);
        let linear = nn::Linear::builder(8, 4).bias(false).build()?;
        linear.to(Kind::Double)?;
        Ok(linear)
    };
    let single = start()?;
    let mut reference = Sgd::builder(&single).lr(1.0).build()?;
    for step in 0..SIZES[0].len() {
        mean(&Tensor::cat(&[rows(0, step), rows(1, step)], 0), &single.weight, is_weighted)?.f_backward()?;
        reference.step()?;
        reference.zero_grad()?;
    }

    let model = start()?;
    let mut opt = Sgd::builder(&model).lr(1.0).build()?;
    let ddp = DistributedDataParallel::new(&model, group)?;
    let mut micro = AutoMicroBatch::new(64).with_ranks(&ddp, group).grow_after(1);
    let mut sizes = Vec::new();
    for step in 0..SIZES[0].len() {
        let own = rows(group.rank(), step);
        if group.rank() == 1 {
            // A tensor of 6 rows has 96,000 bytes, and a pass some five of them.
            let more = if step < 2 { 600_000 } else { usize::MAX >> 1 };
            host_memory::count(usize::MAX)?;
            host_memory::count(usize::try_from(host_memory::stats()?.allocated)?.saturating_add(more))?;
        }
        let mut seen: Vec<f64> = Vec::new();
        let loss = |part: &[Tensor]| -> Result<Tensor> {
            let ids = Vec::<f64>::try_from(&part[0].select(1, 0).contiguous())?;
            if ids[0] <= seen.first().copied().unwrap_or(f64::INFINITY) {
                // The batch begins again.
                seen.clear();
            }
            seen.extend(ids);
            Ok(mean(&part[0], &model.weight, is_weighted)?)
        };
        let count = |part: &[Tensor]| Ok(part[0].select(1, 1).sum(Kind::Double).double_value(&[]) as i64);
        let batch = [own.shallow_clone()];
        let loss = match is_weighted {
            true => micro.backward_weighted(&mut opt, &batch, count, loss)?,
            false => micro.backward(&mut opt, &batch, loss)?,
        };
        let counts = count(&batch)?;
        let expected = tch::no_grad(|| mean(&own, &model.weight, is_weighted))?;
        ensure!(loss.double_value(&[]).is_nan() == (is_weighted && counts == 0), "{loss:?}");
        ensure!(is_weighted && counts == 0 || loss.allclose(&expected, 1e-12, 0.0, false), "step {step}: {loss:?}");
        let ids = Vec::<f64>::try_from(&own.select(1, 0).contiguous())?;
        // Parts without a row that counts are not computed.
        ensure!(is_weighted || seen == ids, "step {step}: {seen:?} instead of {ids:?}");
        opt.step()?;
        let of_all = group.all_gather_object(&micro.size())?;
        ensure!(of_all[0] == of_all[1], "step {step}: {of_all:?}");
        sizes.push(micro.size());
    }
    host_memory::count(usize::MAX)?;
    ensure!(sizes[0] < 12 && sizes.last() > Some(&sizes[0]), "{sizes:?}");
    ensure!(model.weight.allclose(&single.weight, 1e-11, 1e-13, false), "{:?}, {:?}", model.weight, single.weight);
    Ok(())
}

pub fn unequal(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    unequal_by(&group, false)?;
    unequal_by(&group, true)?;

    // A weight that fails on one rank ends both.
    let model = nn::Linear::new(2, 1)?;
    let mut opt = Sgd::builder(&model).lr(1.0).build()?;
    let ddp = DistributedDataParallel::new(&model, &group)?;
    let mut micro = AutoMicroBatch::new(4).with_ranks(&ddp, &group);
    let batch = [Tensor::ones([4, 2], FLOAT)];
    let weight = |_: &[Tensor]| {
        ensure!(group.rank() == 0, "no targets");
        Ok(1)
    };
    let loss = |part: &[Tensor]| Ok(model.forward(&part[0])?.mean(Kind::Float));
    match (group.rank(), micro.backward_weighted(&mut opt, &batch, weight, loss)) {
        (0, Err(MemoryError::OtherRank)) => Ok(()),
        (1, Err(MemoryError::Function { source, .. })) if source.to_string() == "no targets" => Ok(()),
        (rank, other) => anyhow::bail!("rank {rank}: {other:?}"),
    }
}
