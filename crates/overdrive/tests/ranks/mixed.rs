//! GradScaler, autocast, clipping and accumulation under DDP, compared with one process with the large batch.

use anyhow::{Context, Result, bail, ensure};
use overdrive::accum::AccumError;
use overdrive::prelude::*;
use overdrive_core::Entry;
use overdrive_ddp::{DdpError, DistributedDataParallel, GradBucket, OneBitAdam, OneBitAdamOptions, Work};
use tch::nn::{self, Module};

use crate::harness::Meeting;

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);
const STEPS: i64 = 12;
/// Samples of all ranks together, divided into uneven micro-batches.
const BATCH: i64 = 16;
const SIZES: [[i64; 3]; 2] = [[5, 3, 2], [1, 5, 0]];
/// The step at which one sample of rank 1 overflows.
const OVERFLOW: i64 = 4;

struct Run {
    vs: nn::VarStore,
    model: nn::Sequential,
    opt: AdamW,
    scaler: GradScaler,
}

fn start() -> Result<Run> {
    tch::manual_seed(1);
    let vs = nn::VarStore::new(Device::Cpu);
    let model = nn::seq()
        .add(nn::linear(vs.root() / "in", 6, 32, Default::default()))
        .add_fn(Tensor::tanh)
        .add(nn::linear(vs.root() / "out", 32, 3, Default::default()));
    let opt = AdamW::builder(vs.trainable_variables()).lr(1e-2).build()?;
    let scaler = GradScaler::builder(Device::Cpu).init_scale(1024.0).growth_interval(3).build()?;
    Ok(Run { vs, model, opt, scaler })
}

/// The large batch of a step, the same on every rank; the last sample is in rank 1's part.
fn batch(step: i64) -> (Tensor, Tensor) {
    tch::manual_seed(100 + step);
    let (x, y) = (Tensor::randn([BATCH, 6], FLOAT), Tensor::randn([BATCH, 3], FLOAT));
    if step == OVERFLOW {
        let _ = x.get(BATCH - 1).fill_(f64::INFINITY);
    }
    (x, y)
}

impl Run {
    /// Trains one window: backward on each micro-batch, and a step. Returns whether the step was skipped.
    fn window<S: GradientSync>(
        &mut self,
        accum: &mut Accumulator<S>,
        forward: impl Fn(&nn::Sequential, &Tensor) -> Result<Tensor>,
        micro: &[(Tensor, Tensor)],
        kind: Option<Kind>,
    ) -> Result<bool> {
        for (index, (x, y)) in micro.iter().enumerate() {
            let loss = || forward(&self.model, x).map(|outputs| (outputs - y).square().mean(Kind::Float));
            let loss = match kind {
                Some(kind) => autocast(Device::Cpu, kind, loss)??,
                None => loss()?,
            };
            accum.backward(&self.opt, &self.scaler.scale(&loss)?, Samples(x.size()[0]), index + 1 == micro.len())?;
        }
        self.scaler.unscale_(&mut self.opt)?;
        clip_grad_norm_(self.opt.params(), 0.5)?;
        let skipped = self.scaler.step(&mut self.opt)?.skipped()?;
        self.scaler.update()?;
        self.opt.zero_grad()?;
        Ok(skipped)
    }
}

fn same_scaler(ours: &GradScaler, reference: &GradScaler) -> Result<()> {
    let (ours, reference) = (ours.state_dict()?, reference.state_dict()?);
    let text = |state: &StateDict| {
        format!("{:?}", state.iter().map(|(name, entry)| (name.to_owned(), plain(entry))).collect::<Vec<_>>())
    };
    ensure!(text(&ours) == text(&reference), "{} instead of {}", text(&ours), text(&reference));
    Ok(())
}

fn plain(entry: &Entry) -> String {
    match entry {
        Entry::Tensor(tensor) => tensor.to_string(0).unwrap_or_default(),
        other => format!("{other:?}"),
    }
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let rank = group.rank();
    for (kind, tolerance) in [(None, 1e-5), (Some(Kind::BFloat16), 2e-2)] {
        let (mut ours, mut reference) = (start()?, start()?);
        let ddp = DistributedDataParallel::new(&ours.vs, &group)?;
        let mut accum = Accumulator::new(SIZES[0].len())?.with_sync(&ddp);
        let mut whole = Accumulator::new(1)?;
        for step in 0..STEPS {
            let (x, y) = batch(step);
            let start: i64 = SIZES[..rank].iter().flatten().sum();
            let mut first = start;
            let micro: Vec<(Tensor, Tensor)> = SIZES[rank]
                .iter()
                .map(|&size| {
                    first += size;
                    (x.narrow(0, first - size, size), y.narrow(0, first - size, size))
                })
                .collect();
            let forward = |model: &nn::Sequential, x: &Tensor| Ok(ddp.forward(|| model.forward(x))?);
            let skipped = ours.window(&mut accum, forward, &micro, kind)?;
            let expected = reference.window(&mut whole, |model, x| Ok(model.forward(x)), &[(x, y)], kind)?;
            ensure!(skipped == expected && skipped == (step == OVERFLOW), "step {step}: skipped {skipped}");
            same_scaler(&ours.scaler, &reference.scaler).with_context(|| format!("step {step}, {kind:?}"))?;
            for (ours, reference) in ours.opt.params().iter().zip(reference.opt.params()) {
                let error = (ours - &reference).abs().max().double_value(&[]);
                ensure!(error <= tolerance, "step {step}, {kind:?}: off by {error}");
            }
        }
        // The weights are equal bit for bit on both ranks.
        for param in ours.opt.params() {
            for other in group.all_gather(&param.detach())? {
                ensure!(other.equal(&param), "the ranks' models differ");
            }
        }
    }
    Ok(())
}

/// The accumulator returns the hook's error, and `abandon` and the next pass report it too.
pub fn abandoned(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let Run { vs, model, opt, .. } = start()?;
    let ddp = DistributedDataParallel::new(&vs, &group)?;
    ddp.register_comm_hook(|_: &GradBucket| -> Result<Work<Tensor>, DdpError> { Err(DdpError::NoLauncher) })?;
    let mut accum = Accumulator::new(2)?.with_sync(&ddp);
    let (x, y) = batch(0);
    let loss = || ddp.forward(|| model.forward(&x)).map(|outputs| (outputs - &y).square().mean(Kind::Float));
    accum.backward(&opt, &loss()?, Samples(BATCH), false)?;
    let told = accum.backward(&opt, &loss()?, Samples(BATCH), true).err().context("the failure was not reported")?;
    let AccumError::Sync(told) = told else { bail!("{told}") };
    ensure!(matches!(told.0.downcast_ref(), Some(DdpError::Hook(inner)) if inner.is::<DdpError>()), "{told}");
    let told = accum.abandon().err().context("`abandon` did not report the failure")?.to_string();
    ensure!(told.contains("has failed before") && told.contains("no launcher"), "{told}");
    let told = loss().err().context("a pass after the failed one was accepted")?;
    ensure!(matches!(&told, DdpError::HookHasFailed { first } if first.contains("no launcher")), "{told}");
    Ok(())
}

/// The accumulator returns DDP's error for a lost rank, and libtorch's error for a failure of backward itself.
pub fn lost_in_window(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let Run { vs, model, opt, .. } = start()?;
    let ddp = DistributedDataParallel::new(&vs, &group)?;
    let mut accum = Accumulator::new(2)?.with_sync(&ddp);
    let (x, y) = batch(0);
    let loss = || ddp.forward(|| model.forward(&x)).map(|outputs| (outputs - &y).square().mean(Kind::Float));
    let without_graph = accum.backward(&opt, &Tensor::from(1.0), Samples(BATCH), false);
    ensure!(matches!(without_graph, Err(AccumError::Torch(_))), "{without_graph:?}");
    accum.abandon()?;
    accum.backward(&opt, &loss()?, Samples(BATCH), false)?;
    let loss = loss()?;
    if group.rank() == 1 {
        return Ok(());
    }
    let told = accum.backward(&opt, &loss, Samples(BATCH), true).err().context("the lost rank was not reported")?;
    let AccumError::Sync(told) = told else { bail!("{told}") };
    ensure!(matches!(told.0.downcast_ref(), Some(DdpError::Lost { .. } | DdpError::TimedOut { .. })), "{told}");
    ensure!(told.to_string().contains("backward on rank 0 of 2"), "{told}");
    Ok(())
}

/// A scaler refuses an optimizer that communicates in its steps; otherwise one rank could skip a step in which the
/// other waits.
pub fn one_bit_adam(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let param = Tensor::ones([8], FLOAT).set_requires_grad(true);
    let mut opt = OneBitAdam::new(&group, [param.shallow_clone()], OneBitAdamOptions::default())?;
    let mut scaler = GradScaler::builder(Device::Cpu).init_scale(4.0).build()?;
    // Infinite only on the second rank.
    let factor = if group.rank() == 1 { f64::INFINITY } else { 1.0 };
    scaler.scale(&(&param * factor).sum(Kind::Float))?.backward();
    for refused in [scaler.unscale_(&mut opt), scaler.step(&mut opt).map(drop)] {
        let told = refused.err().context("the scaler accepted the optimizer")?.to_string();
        ensure!(told.contains("GradScaler cannot be used with this optimizer: it averages over ranks"), "{told}");
    }
    ensure!(param.equal(&Tensor::ones([8], FLOAT)), "refused, but stepped");
    // Both ranks can continue.
    opt.zero_grad()?;
    param.sum(Kind::Float).backward();
    opt.step()?;
    ensure!(param.lt(1.0).all().int64_value(&[]) == 1, "the step changed nothing");
    Ok(())
}
