//! Mixed precision: what passes compute in, what the optimizer sees, and what is refused.

use anyhow::{Result, ensure};
use overdrive_core::GradientSync;
use overdrive_ddp::{DdpBuilder, DdpError, DistributedDataParallel, MixedPrecision, ProcessGroup, ReduceOp};
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);
const BFLOAT16: MixedPrecision =
    MixedPrecision { param_dtype: Some(Kind::BFloat16), reduce_dtype: Some(Kind::Float), buffer_dtype: None };

struct Run {
    params: Vec<(String, Tensor)>,
    frozen: Tensor,
    ddp: DistributedDataParallel,
}

impl Run {
    fn new(group: &ProcessGroup, options: impl FnOnce(DdpBuilder) -> DdpBuilder) -> Result<Self, DdpError> {
        tch::manual_seed(1);
        let named = |name: &str, shape: &[i64]| (name.to_owned(), Tensor::randn(shape, FLOAT).set_requires_grad(true));
        let params = vec![named("a", &[12, 6]), named("b", &[12]), named("c", &[3, 12])];
        let frozen = Tensor::randn([3], FLOAT);
        let mut all: Vec<_> = params.iter().map(|(name, it)| (name.clone(), it.shallow_clone())).collect();
        all.push(("frozen".to_owned(), frozen.shallow_clone()));
        let builder = DistributedDataParallel::builder(group).bucket_cap_mb(0.0002);
        let ddp = options(builder).build_from(all, Vec::new())?;
        Ok(Self { params, frozen, ddp })
    }

    fn outputs(&self, inputs: &Tensor) -> Tensor {
        let hidden = inputs.linear(&self.params[0].1, Some(&self.params[1].1)).tanh();
        hidden.linear(&self.params[2].1, Some(&self.frozen))
    }

    fn loss(&self, rank: usize, step: i64, kind: Kind) -> Result<Tensor> {
        tch::manual_seed(10 * step + rank as i64);
        let inputs = Tensor::randn([4, 6], FLOAT).to_kind(kind);
        Ok(self.ddp.forward(|| self.outputs(&inputs))?.to_kind(Kind::Float).square().mean(Kind::Float))
    }

    fn grads(&self) -> Vec<Tensor> {
        self.params.iter().map(|(_, param)| param.grad().copy()).collect()
    }

    /// Checks that nothing is in low precision.
    fn is_whole(&self) -> Result<()> {
        for (name, param) in &self.params {
            let grad = param.grad();
            ensure!(param.kind() == Kind::Float && (!grad.defined() || grad.kind() == Kind::Float), "{name}");
        }
        ensure!(self.frozen.kind() == Kind::Float);
        Ok(())
    }
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let rank = group.rank();
    let run = Run::new(&group, |ddp| ddp.mixed_precision(BFLOAT16))?;
    run.is_whole()?;
    let before: Vec<Tensor> = run.params.iter().map(|(_, param)| param.detach().copy()).collect();
    let places: Vec<usize> = run.params.iter().map(|(_, param)| param.data_ptr() as usize).collect();
    for step in 0..4 {
        let loss = run.loss(rank, step, Kind::BFloat16)?;
        ensure!(run.params.iter().all(|(_, param)| param.kind() == Kind::BFloat16), "the pass is in full precision");
        ensure!(run.frozen.kind() == Kind::BFloat16);
        // tch's own backward ends the pass too.
        if step % 2 == 0 {
            run.ddp.backward(&loss)?
        } else {
            loss.backward()
        }
        run.is_whole()?;
        averaged(&group, &run, step)?;
        run.params.iter().for_each(|(_, param)| param.shallow_clone().zero_grad());
    }
    // What the optimizer steps is as it was, in the same memory.
    for ((param, before), place) in run.params.iter().zip(&before).zip(&places) {
        ensure!(param.1.equal(before) && param.1.data_ptr() as usize == *place, "{}", param.0);
    }
    add_up(&group)?;
    an_evaluation_is_low_too(&run)?;
    unused(&group)?;
    zeroed_between(&group)?;
    failures(&group)?;
    failed_backward(&group)?;
    no_backward(&group)?;
    one_backward(&group)?;
    refusals(&group)
}

/// The mean of the gradients that each rank computes alone in bfloat16, added up in float32.
fn averaged(group: &ProcessGroup, run: &Run, step: i64) -> Result<()> {
    for (grad, expected) in run.grads().iter().zip(mean(group, run, step..step + 1)?) {
        // Sums over more than two ranks may be rounded in another order.
        let same = if group.size() == 2 { grad.equal(&expected) } else { grad.allclose(&expected, 1e-6, 1e-6, false) };
        ensure!(same, "step {step}: {grad}, but {expected} was expected");
    }
    Ok(())
}

/// Without DDP: each pass on copies in bfloat16, its gradients added up in float32.
fn mean(group: &ProcessGroup, run: &Run, steps: std::ops::Range<i64>) -> Result<Vec<Tensor>> {
    let mut sums: Vec<Tensor> = run.params.iter().map(|(_, param)| param.detach().zeros_like()).collect();
    for step in steps {
        let low = |param: &Tensor| param.detach().to_kind(Kind::BFloat16).set_requires_grad(true);
        let copies: Vec<Tensor> = run.params.iter().map(|(_, param)| low(param)).collect();
        tch::manual_seed(10 * step + group.rank() as i64);
        let inputs = Tensor::randn([4, 6], FLOAT).to_kind(Kind::BFloat16);
        let hidden = inputs.linear(&copies[0], Some(&copies[1])).tanh();
        let outputs = hidden.linear(&copies[2], Some(&run.frozen.to_kind(Kind::BFloat16)));
        outputs.to_kind(Kind::Float).square().mean(Kind::Float).backward();
        for (sum, copy) in sums.iter_mut().zip(&copies) {
            let _ = sum.g_add_(&copy.grad());
        }
    }
    for sum in &mut sums {
        group.all_reduce(sum, ReduceOp::Sum)?;
        let _ = sum.g_div_scalar_(group.size() as f64);
    }
    Ok(sums)
}

/// Local passes add up in float32, also over a window of accumulation that a rank ends with nothing.
fn add_up(group: &ProcessGroup) -> Result<()> {
    for ends_with_nothing in [false, true] {
        let run = Run::new(group, |ddp| ddp.mixed_precision(BFLOAT16))?;
        let (rank, last) = (group.rank(), 3);
        for step in 0..last {
            let _held = run.ddp.no_sync();
            run.ddp.backward(&run.loss(rank, step, Kind::BFloat16)?)?;
            run.is_whole()?;
        }
        let mut expected = mean(group, &run, 0..last)?;
        if ends_with_nothing && rank == 1 {
            GradientSync::close_with_nothing(&run.ddp)?;
        } else {
            run.ddp.backward(&run.loss(rank, last, Kind::BFloat16)?)?;
        }
        run.is_whole()?;
        // The last pass, of all ranks but those that end with nothing.
        let weight = if ends_with_nothing && rank == 1 { 0.0 } else { 1.0 };
        let own = Run::new(group, |ddp| ddp)?;
        for (expected, part) in expected.iter_mut().zip(alone(group, &own, last, weight)?) {
            let _ = expected.g_add_(&part);
        }
        for (grad, expected) in run.grads().iter().zip(&expected) {
            let close = grad.allclose(expected, 1e-6, 1e-6, false);
            ensure!(close, "ends with nothing: {ends_with_nothing}: {grad}, but {expected} was expected");
        }
    }
    Ok(())
}

fn alone(group: &ProcessGroup, run: &Run, step: i64, weight: f64) -> Result<Vec<Tensor>> {
    let own = |param: &Tensor| param.detach().to_kind(Kind::BFloat16).set_requires_grad(true);
    let copies: Vec<Tensor> = run.params.iter().map(|(_, param)| own(param)).collect();
    tch::manual_seed(10 * step + group.rank() as i64);
    let inputs = Tensor::randn([4, 6], FLOAT).to_kind(Kind::BFloat16);
    let hidden = inputs.linear(&copies[0], Some(&copies[1])).tanh();
    let outputs = hidden.linear(&copies[2], Some(&run.frozen.to_kind(Kind::BFloat16)));
    outputs.to_kind(Kind::Float).square().mean(Kind::Float).backward();
    let mut parts: Vec<Tensor> = copies.iter().map(|copy| copy.grad().to_kind(Kind::Float) * weight).collect();
    for part in &mut parts {
        group.all_reduce(part, ReduceOp::Sum)?;
        let _ = part.g_div_scalar_(group.size() as f64);
    }
    Ok(parts)
}

fn an_evaluation_is_low_too(run: &Run) -> Result<()> {
    let inputs = Tensor::ones([2, 6], (Kind::BFloat16, Device::Cpu));
    let outputs = tch::no_grad(|| run.ddp.forward(|| run.outputs(&inputs)))?;
    ensure!(outputs.kind() == Kind::BFloat16);
    run.is_whole()
}

/// A parameter that one rank does not use gets the average of the others, in full precision.
fn unused(group: &ProcessGroup) -> Result<()> {
    let run = Run::new(group, |ddp| ddp.mixed_precision(BFLOAT16).find_unused_parameters(true))?;
    let inputs = Tensor::ones([2, 6], (Kind::BFloat16, Device::Cpu));
    let uses_all = group.rank() == 0;
    for _ in 0..2 {
        run.params.iter().for_each(|(_, param)| param.shallow_clone().zero_grad());
        let outputs = run.ddp.forward(|| match uses_all {
            true => run.outputs(&inputs),
            false => inputs.linear(&run.params[0].1, Some(&run.params[1].1)),
        })?;
        run.ddp.backward(&outputs.to_kind(Kind::Float).sum(Kind::Float))?;
        run.is_whole()?;
        let grad = run.params[2].1.grad();
        let all = group.all_gather(&grad)?;
        ensure!(grad.abs().sum(Kind::Float).double_value(&[]) > 0.0 && all[0].equal(&all[1]), "{all:?}");
    }
    Ok(())
}

/// A pass that fails ends too: the parameters are whole, and the next pass works.
fn failures(group: &ProcessGroup) -> Result<()> {
    let run = Run::new(group, |ddp| ddp.mixed_precision(BFLOAT16))?;
    let model = || -> Tensor { panic!("planted") };
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run.ddp.forward(model).map(drop)));
    ensure!(panicked.is_err());
    run.is_whole()?;
    // A second forward pass before backward is of the same parameters.
    drop(run.loss(group.rank(), 0, Kind::BFloat16)?);
    let loss = run.loss(group.rank(), 1, Kind::BFloat16)?;
    run.ddp.backward(&loss)?;
    averaged(group, &run, 1)?;
    // A program that forgets the backward pass keeps its parameters.
    drop(run.loss(group.rank(), 2, Kind::BFloat16)?);
    let params: Vec<Tensor> = run.params.iter().map(|(_, param)| param.shallow_clone()).collect();
    drop(run);
    ensure!(params.iter().all(|param| param.kind() == Kind::Float), "{params:?}");
    Ok(())
}

/// Gradients that are zeroed between forward and backward, as tch's `backward_step` does, add up no more.
fn zeroed_between(group: &ProcessGroup) -> Result<()> {
    let run = Run::new(group, |ddp| ddp.mixed_precision(BFLOAT16))?;
    for step in 0..3 {
        let loss = run.loss(group.rank(), step, Kind::BFloat16)?;
        run.params.iter().for_each(|(_, param)| param.shallow_clone().zero_grad());
        run.ddp.backward(&loss)?;
        averaged(group, &run, step)?;
    }
    Ok(())
}

/// After a backward pass that has failed, the next forward begins anew, also by tch's own backward.
fn failed_backward(group: &ProcessGroup) -> Result<()> {
    let run = Run::new(group, |ddp| ddp.mixed_precision(BFLOAT16))?;
    for by_tch in [false, true] {
        let loss = run.loss(group.rank(), 0, Kind::BFloat16)?;
        // Not a number: `backward` refuses it.
        let failing = loss.unsqueeze(0).expand([2], false);
        let failed = if by_tch { failing.f_backward().is_err() } else { run.ddp.backward(&failing).is_err() };
        ensure!(failed, "it was accepted");
        let _freed = run.params.iter().map(|(_, param)| param.shallow_clone().zero_grad()).count();
        let loss = run.loss(group.rank(), 1, Kind::BFloat16)?;
        if by_tch {
            loss.f_backward()?
        } else {
            run.ddp.backward(&loss)?
        }
        run.is_whole()?;
        averaged(group, &run, 1)?;
        run.params.iter().for_each(|(_, param)| param.shallow_clone().zero_grad());
    }
    Ok(())
}

/// A model that returns an error, or outputs that need no gradient, leaves the parameters whole.
fn no_backward(group: &ProcessGroup) -> Result<()> {
    let run = Run::new(group, |ddp| ddp.mixed_precision(BFLOAT16))?;
    let failed = run.ddp.forward(|| Err::<Tensor, _>("planted"))?;
    ensure!(failed.is_err());
    run.is_whole()?;
    let _detached = run.ddp.forward(|| run.params[0].1.detach())?;
    run.is_whole()
}

/// A second backward pass would compute with the parameters in full precision.
fn one_backward(group: &ProcessGroup) -> Result<()> {
    let run = Run::new(group, |ddp| ddp.mixed_precision(BFLOAT16))?;
    let _held = run.ddp.no_sync();
    let (first, second) = (run.loss(group.rank(), 0, Kind::BFloat16)?, run.loss(group.rank(), 1, Kind::BFloat16)?);
    run.ddp.backward(&first)?;
    let told = run.ddp.backward(&second).err().map(|error| error.to_string()).unwrap_or_default();
    ensure!(told.contains("run one backward pass for each forward pass"), "{told}");
    run.is_whole()
}

fn refusals(group: &ProcessGroup) -> Result<()> {
    type Options = fn(DdpBuilder) -> DdpBuilder;
    let refused: [(&str, Options); 4] = [
        ("together with gradient_as_bucket_view", |ddp| ddp.gradient_as_bucket_view(true).mixed_precision(BFLOAT16)),
        ("together with static_graph", |ddp| ddp.static_graph(true).mixed_precision(BFLOAT16)),
        ("together with sparse_gradients", |ddp| ddp.sparse_gradients(["a"]).mixed_precision(BFLOAT16)),
        ("param_dtype is Int64", |ddp| {
            ddp.mixed_precision(MixedPrecision { param_dtype: Some(Kind::Int64), ..MixedPrecision::default() })
        }),
    ];
    for (said, options) in refused {
        let error = Run::new(group, options).err().map(|error| error.to_string()).unwrap_or_default();
        ensure!(error.contains(said), "{said}: {error:?}");
    }
    let run = Run::new(group, |ddp| ddp.mixed_precision(BFLOAT16))?;
    ensure!(matches!(run.ddp.register_fp16_compress(), Err(DdpError::HookTaken)));
    Ok(())
}
