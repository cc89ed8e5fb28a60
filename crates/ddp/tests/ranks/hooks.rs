//! Communication hooks, each against its definition in one process.

use anyhow::{Context, Result, ensure};
use overdrive_core::{Optimizer, Stateful};
use overdrive_ddp::hooks::{CastCompress, OneBit, PowerSgd, PowerSgdOptions, TopK};
use overdrive_ddp::{
    CommHook, DdpError, DistributedDataParallel, GradBucket, OneBitAdam, OneBitAdamOptions, ProcessGroup, ReduceOp,
    Work,
};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);
const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

/// Rank `rank`'s gradients at a step.
pub fn grads(rank: usize, step: usize, count: i64) -> Tensor {
    tch::manual_seed((step * 100 + rank + 1) as i64);
    Tensor::randn([count], DOUBLE)
}

fn bucket(buffer: &Tensor, shape: &[i64]) -> GradBucket {
    let parameters = vec![Tensor::zeros(shape, (buffer.kind(), Device::Cpu))];
    let gradients = vec![buffer.view(shape)];
    GradBucket { index: 0, is_last: true, buffer: buffer.shallow_clone(), gradients, parameters, earlier: Vec::new() }
}

pub fn runs(hook: &mut impl CommHook, buffer: &Tensor, shape: &[i64]) -> Result<Tensor> {
    let bucket = bucket(buffer, shape);
    let in_flight = hook.start(&bucket)?;
    Ok(hook.finish(&bucket, in_flight)?)
}

pub fn close(found: &Tensor, expected: &Tensor, what: &str) -> Result<()> {
    let (relative, absolute) = if found.kind() == Kind::Double { (1e-9, 1e-12) } else { (1e-5, 1e-6) };
    let equal = found.to_kind(Kind::Double).allclose(expected, relative, absolute, false);
    ensure!(equal, "{what}: {found} instead of {expected}");
    Ok(())
}

pub fn mean(all: &[Tensor]) -> Tensor {
    Tensor::stack(all, 0).mean_dim(&[0i64][..], false, None::<Kind>)
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    casts(&group).context("casts")?;
    // float32 has its own kernels.
    for kind in [Kind::Double, Kind::Float] {
        top_k(&group, kind).with_context(|| format!("top-k of {kind:?}"))?;
        one_bit(&group, kind).with_context(|| format!("1-bit of {kind:?}"))?;
    }
    one_bit_adam(&group)?;
    power_sgd(&group).context("PowerSGD")?;
    options(&group)?;
    set_late(&group).context("set late")?;
    in_training(&group).context("in training")
}

/// Divided, rounded, summed in the narrow type.
fn casts(group: &ProcessGroup) -> Result<()> {
    for (mut hook, kind) in [(CastCompress::half(group), Kind::Half), (CastCompress::bfloat16(group), Kind::BFloat16)] {
        let buffer = grads(group.rank(), 0, 37).to_kind(Kind::Float);
        let found = runs(&mut hook, &buffer, &[37])?;
        let all: Vec<Tensor> = (0..group.size()).map(|rank| grads(rank, 0, 37)).collect();
        let error = (found.to_kind(Kind::Double) - mean(&all)).abs().max().double_value(&[]);
        let rounding = if kind == Kind::Half { 2e-3 } else { 2e-2 };
        ensure!(found.kind() == Kind::Float && error > 0.0 && error < rounding, "{kind:?}: off by {error}");
        // With two ranks each sum is rounded once; with more, the result depends on the order.
        if group.size() == 2 {
            let sent = |rank: usize| all[rank].to_kind(Kind::Float).to_kind(kind) / 2.0;
            let expected = (sent(0) + sent(1)).to_kind(Kind::Float);
            ensure!(found.equal(&expected), "{kind:?}: {found} instead of {expected}");
        }
    }
    Ok(())
}

/// Every rank's largest, the rest kept for the next step.
fn top_k(group: &ProcessGroup, kind: Kind) -> Result<()> {
    const COUNT: i64 = 40;
    let mut hook = TopK::new(group, 0.1, 1)?;
    let mut errors: Vec<Tensor> = (0..group.size()).map(|_| Tensor::zeros([COUNT], DOUBLE)).collect();
    for step in 0..6 {
        let found = runs(&mut hook, &grads(group.rank(), step, COUNT).to_kind(kind), &[COUNT])?;
        let all: Vec<Tensor> = (0..group.size()).map(|rank| grads(rank, step, COUNT)).collect();
        let expected = if step == 0 {
            mean(&all)
        } else {
            let sent: Vec<Tensor> = all
                .iter()
                .zip(&mut errors)
                .map(|(grads, error)| {
                    let whole = grads + &*error;
                    // The fourth largest is the least that is sent.
                    let least = whole.abs().sort(0, true).0.double_value(&[3]);
                    let sent = whole.where_self(&whole.abs().ge(least), &whole.zeros_like());
                    *error = &whole - &sent;
                    sent
                })
                .collect();
            mean(&sent)
        };
        close(&found, &expected, &format!("step {step}"))?;
    }
    Ok(())
}

/// A reference of the mean by signs: each rank rounds its own tensor, and then its part of the mean.
pub struct SignedReference {
    errors: Vec<Tensor>,
    mean_error: Tensor,
}

impl SignedReference {
    pub fn new(ranks: usize, count: i64) -> Self {
        let zeros = || Tensor::zeros([count], DOUBLE);
        Self { errors: (0..ranks).map(|_| zeros()).collect(), mean_error: zeros() }
    }

    pub fn mean(&mut self, all: &[Tensor]) -> Tensor {
        let sign = |tensor: &Tensor| tensor.ge(0.0).to_kind(Kind::Double) * 2.0 - 1.0;
        let rounded =
            |tensor: &Tensor| sign(tensor) * (tensor.norm().double_value(&[]) / (tensor.numel() as f64).sqrt());
        let (ranks, count) = (all.len() as i64, all[0].numel() as i64);
        let part = (count + 8 * ranks - 1) / (8 * ranks) * 8;
        let sent: Vec<Tensor> = all
            .iter()
            .zip(&mut self.errors)
            .map(|(grads, error)| {
                let whole = grads + &*error;
                let sent = rounded(&whole);
                *error = whole - &sent;
                sent
            })
            .collect();
        let whole = mean(&sent) + &self.mean_error;
        // Each rank rounds its part with its own scale.
        let starts = (0..ranks).map(|rank| (rank * part).min(count));
        let parts: Vec<Tensor> =
            starts.map(|start| rounded(&whole.narrow(0, start, part.min(count - start)))).collect();
        let expected = Tensor::cat(&parts, 0);
        self.mean_error = whole - &expected;
        expected
    }
}

/// Signs and one scale from each rank, and again of each rank's part of the mean.
fn one_bit(group: &ProcessGroup, kind: Kind) -> Result<()> {
    const COUNT: i64 = 101;
    let mut hook = OneBit::new(group, 1);
    let mut reference = SignedReference::new(group.size(), COUNT);
    for step in 0..6 {
        let found = runs(&mut hook, &grads(group.rank(), step, COUNT).to_kind(kind), &[COUNT])?;
        let all: Vec<Tensor> = (0..group.size()).map(|rank| grads(rank, step, COUNT)).collect();
        let expected = if step == 0 { mean(&all) } else { reference.mean(&all) };
        close(&found, &expected, &format!("step {step}"))?;
    }
    Ok(())
}

/// Adam until the squares are frozen, then momentum by signs; resumed in the middle from its state.
fn one_bit_adam(group: &ProcessGroup) -> Result<()> {
    const COUNT: i64 = 101;
    let (ranks, options) = (group.size(), OneBitAdamOptions { lr: 0.01, freeze_step: 4, ..Default::default() });
    let given = |weights: &Tensor| {
        [weights.narrow(0, 0, 90).view([9, 10]), weights.narrow(0, 90, 11)]
            .map(|part| part.copy().set_requires_grad(true))
    };
    let start = grads(90, 0, COUNT);
    let params = given(&start);
    let mut opt = OneBitAdam::new(group, &params, options)?;
    let (mut weights, mut momentum, mut squares) = (start.copy(), start.zeros_like(), start.zeros_like());
    let mut reference = SignedReference::new(ranks, COUNT);
    for step in 1..=12 {
        let all: Vec<Tensor> = (0..ranks).map(|rank| grads(rank, step, COUNT)).collect();
        if step <= 4 {
            let mean = mean(&all);
            momentum = momentum * 0.9 + &mean * 0.1;
            squares = squares * 0.999 + mean.square() * 0.001;
        } else {
            let own: Vec<Tensor> = all.iter().map(|grads| &momentum * 0.9 + grads * 0.1).collect();
            momentum = reference.mean(&own);
        }
        let correction = |beta: f64, step: usize| 1.0 - beta.powi(step as i32);
        let root = (&squares / correction(0.999, step.min(4))).sqrt() + 1e-8;
        weights -= &momentum / correction(0.9, step) / root * 0.01;

        ensure!(opt.is_compressing() == (step > 4));
        let flat = Tensor::cat(&[params[0].view([-1]), params[1].shallow_clone()], 0);
        (flat * &all[group.rank()]).sum(Kind::Double).backward();
        opt.step()?;
        opt.zero_grad()?;
        let found = Tensor::cat(&[params[0].detach().view([-1]), params[1].detach()], 0);
        close(&found, &weights, &format!("1-bit Adam, step {step}"))?;
        if step == 7 {
            // Another optimizer continues from its state.
            let state = opt.state_dict()?;
            opt = OneBitAdam::new(group, &params, OneBitAdamOptions::default())?;
            opt.load_state_dict(&state)?;
        }
    }
    let refused = OneBitAdam::new(group, &params, OneBitAdamOptions { betas: (1.0, 0.9), ..options });
    ensure!(refused.is_err_and(|error| error.to_string().starts_with("beta1 is 1")));
    Ok(())
}

fn power_sgd(group: &ProcessGroup) -> Result<()> {
    let (rank, ranks) = (group.rank(), group.size());
    let shape = [12, 10];
    let options = PowerSgdOptions { start_power_sgd_iter: 2, matrix_approximation_rank: 2, ..Default::default() };
    // All gradients have rank 2, so an approximation of rank 2 loses nothing.
    let left = grads(90, 0, 24).view([12, 2]);
    let thin = |rank: usize, step: usize| left.matmul(&grads(rank, step, 20).view([2, 10])).view([-1]);
    let mut hook = PowerSgd::new(group, options)?;
    for step in 0..5 {
        let found = runs(&mut hook, &thin(rank, step), &shape)?;
        let all: Vec<Tensor> = (0..ranks).map(|rank| thin(rank, step)).collect();
        let expected = mean(&all);
        let error = (found - &expected).abs().max().double_value(&[]);
        ensure!(error < 1e-8, "step {step}: off by {error} where nothing is lost");
    }
    // Gradients of full rank: each step loses something, and error feedback adds it later.
    let mut hook = PowerSgd::new(group, PowerSgdOptions { start_power_sgd_iter: 2, ..Default::default() })?;
    let full: Vec<Tensor> = (0..ranks).map(|rank| grads(rank, 7, 120)).collect();
    let mut total = Tensor::zeros([120], DOUBLE);
    let mut first_error = 0.0;
    for step in 0..60 {
        let given = if step <= 2 { full[rank].copy() } else { Tensor::zeros([120], DOUBLE) };
        let found = runs(&mut hook, &given, &shape)?;
        if step < 2 {
            close(&found, &mean(&full), "a step before compression")?;
            continue;
        }
        total += found;
        if step == 2 {
            first_error = (&total - mean(&full)).norm().double_value(&[]);
        }
    }
    let last_error = (&total - mean(&full)).norm().double_value(&[]);
    ensure!(first_error > 0.1, "rank 1 cannot represent a matrix of full rank: {first_error}");
    ensure!(last_error < 1e-3 * first_error, "{last_error} of {first_error} is still missing");
    // All ranks hold the same.
    for other in group.all_gather(&total)? {
        ensure!(other.equal(&total), "ranks differ");
    }
    // Vectors are sent whole.
    let mut hook = PowerSgd::new(group, options)?;
    for step in 0..4 {
        let found = runs(&mut hook, &grads(rank, step, 9), &[9])?;
        let all: Vec<Tensor> = (0..ranks).map(|rank| grads(rank, step, 9)).collect();
        close(&found, &mean(&all), "a vector")?;
    }
    Ok(())
}

fn options(group: &ProcessGroup) -> Result<()> {
    let power = |options| PowerSgd::new(group, options).map(drop);
    let defaults = PowerSgdOptions::default();
    for refused in [
        power(PowerSgdOptions { matrix_approximation_rank: 0, ..defaults }),
        power(PowerSgdOptions { start_power_sgd_iter: 1, ..defaults }),
        power(PowerSgdOptions { min_compression_rate: f64::NAN, ..defaults }),
        TopK::new(group, 0.0, 0).map(drop),
        TopK::new(group, 1.5, 0).map(drop),
    ] {
        ensure!(matches!(refused, Err(DdpError::InvalidOption { .. })), "{refused:?}");
    }
    Ok(())
}

/// Registers a hook after two passes without one, between a forward pass and its backward.
fn set_late(group: &ProcessGroup) -> Result<()> {
    let (mut param, ddp) = small(group)?;
    let mean = (group.size() as f64 + 1.0) / 2.0;
    for step in 0..4 {
        let inputs = Tensor::full([2], group.rank() as f64 + 1.0, FLOAT);
        let loss = ddp.forward(|| &param * inputs)?.sum(Kind::Float);
        if step == 2 {
            let sums = group.clone();
            // Ten times the mean, so that the hook's effect is visible.
            ddp.register_comm_hook(move |bucket: &GradBucket| {
                let mut sum = &bucket.buffer * 10;
                Ok(sums.all_reduce_async(&mut sum, ReduceOp::Avg)?.and_then(move |()| Ok(sum)))
            })?;
        }
        ddp.backward(&loss)?;
        let (found, expected) = (param.grad().double_value(&[0]), if step < 2 { mean } else { 10.0 * mean });
        ensure!((found - expected).abs() < 1e-5, "step {step}: {found} instead of {expected}");
        param.zero_grad();
    }
    Ok(())
}

/// A model trained through each hook stays the same on all ranks, and learns.
fn in_training(group: &ProcessGroup) -> Result<()> {
    let power = PowerSgdOptions { start_power_sgd_iter: 2, min_compression_rate: 1.0, ..Default::default() };
    let plain = trained(group, |_| Ok(()))?;
    let by_hand = {
        let group = group.clone();
        move |bucket: &GradBucket| -> Result<Work<Tensor>, DdpError> {
            let mut sum = bucket.buffer.shallow_clone();
            let work = group.all_reduce_async(&mut sum, ReduceOp::Avg)?;
            Ok(work.and_then(move |()| Ok(sum)))
        }
    };
    ensure!(!has_hook(&small(group)?.1)?);
    let closure = trained(group, move |ddp| ddp.register_comm_hook(by_hand))?;
    ensure!((closure - plain).abs() < 1e-5, "an all-reduce by hand: {closure} instead of {plain}");
    let lossy: Vec<(&str, f64)> = vec![
        ("libtorch's float16", trained(group, |ddp| ddp.register_fp16_compress())?),
        ("float16", trained(group, |ddp| ddp.register_comm_hook(CastCompress::half(group)))?),
        ("bfloat16", trained(group, |ddp| ddp.register_comm_hook(CastCompress::bfloat16(group)))?),
        ("top-k", trained(group, |ddp| ddp.register_comm_hook(TopK::new(group, 0.25, 1)?))?),
        ("1-bit", trained(group, |ddp| ddp.register_comm_hook(OneBit::new(group, 5)))?),
        ("PowerSGD", trained(group, |ddp| ddp.register_comm_hook(PowerSgd::new(group, power)?))?),
    ];
    for (name, loss) in lossy {
        ensure!(loss < 0.25, "{name}: the loss is {loss}, without a hook {plain}");
    }
    Ok(())
}

/// The last loss of a small regression, which begins near 1.
fn trained(
    group: &ProcessGroup,
    register: impl FnOnce(&DistributedDataParallel) -> Result<(), DdpError>,
) -> Result<f64> {
    tch::manual_seed(3);
    let vs = nn::VarStore::new(Device::Cpu);
    let model = nn::seq()
        .add(nn::linear(vs.root() / 0, 8, 32, Default::default()))
        .add_fn(|x| x.tanh())
        .add(nn::linear(vs.root() / 1, 32, 4, Default::default()));
    let ddp = DistributedDataParallel::builder(group).bucket_cap_mb(1.0 / 1024.0).build(&vs)?;
    register(&ddp)?;
    if has_hook(&ddp)? {
        ensure!(matches!(ddp.register_comm_hook(CastCompress::half(group)), Err(DdpError::HookTaken)));
        ensure!(matches!(ddp.register_fp16_compress(), Err(DdpError::HookTaken)));
    }
    tch::manual_seed(10 + group.rank() as i64);
    let inputs = Tensor::randn([32, 8], FLOAT);
    let targets = inputs.narrow(1, 0, 4).sin();
    let mut last = f64::INFINITY;
    for _ in 0..60 {
        let loss = (ddp.forward(|| model.forward(&inputs))? - &targets).square().mean(Kind::Float);
        ddp.backward(&loss)?;
        tch::no_grad(|| {
            for mut param in vs.trainable_variables() {
                let grad = param.grad();
                let _ = param.g_sub_(&(grad * 0.3));
                param.zero_grad();
            }
        });
        last = loss.double_value(&[]);
    }
    for param in vs.trainable_variables() {
        for other in group.all_gather(&param.detach().contiguous())? {
            ensure!(other.equal(&param), "the ranks' models differ");
        }
    }
    let mut loss = Tensor::from(last);
    group.all_reduce(&mut loss, ReduceOp::Avg)?;
    Ok(loss.double_value(&[]))
}

fn has_hook(ddp: &DistributedDataParallel) -> Result<bool> {
    Ok(ddp.logging_data()?.iter().any(|(name, _)| name == "comm_hook"))
}

pub fn small(group: &ProcessGroup) -> Result<(Tensor, DistributedDataParallel)> {
    let param = Tensor::ones([2], FLOAT).set_requires_grad(true);
    let params = vec![("w".to_owned(), param.shallow_clone())];
    Ok((param, DistributedDataParallel::builder(group).build_from(params, Vec::new())?))
}
