//! Compressing hooks and 1-bit Adam: infinities, parameters that no gradient reaches, and invalid parameters.

use anyhow::{Result, ensure};
use overdrive_core::{Optimizer, OptimizerError, Stateful};
use overdrive_ddp::hooks::{OneBit, PowerSgd, PowerSgdOptions, TopK};
use overdrive_ddp::{CommHook, OneBitAdam, OneBitAdamOptions, ProcessGroup};
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;
use crate::hooks::runs;

const COUNT: i64 = 120;

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    for kind in [Kind::Float, Kind::Double] {
        let power = PowerSgdOptions { start_power_sgd_iter: 2, ..Default::default() };
        passes(&group, kind, OneBit::new(&group, 1))?;
        passes(&group, kind, TopK::new(&group, 0.05, 1)?)?;
        passes(&group, kind, PowerSgd::new(&group, power)?)?;
    }
    unreached(&group)?;
    sparse(&group)?;
    scalers(&group)?;
    momentum(&group)?;
    frozen(&group)?;
    refusals(&group)
}

/// An infinity on one rank reaches all ranks in the same step, so that every scaler skips it, and is in no later step.
fn passes(group: &ProcessGroup, kind: Kind, mut hook: impl CommHook) -> Result<()> {
    for step in 0..8 {
        tch::manual_seed(step + 100 * group.rank() as i64);
        let grads = Tensor::randn([COUNT], (kind, Device::Cpu));
        if step == 4 && group.rank() == 1 {
            let _ = grads.narrow(0, 7, 30).f_copy_(&Tensor::from(f32::INFINITY).to_kind(kind).expand([30], false));
        }
        let mean = runs(&mut hook, &grads, &[12, 10])?;
        let finite = mean.isfinite().all().int64_value(&[]) != 0;
        ensure!(finite == (step != 4), "{kind:?}, step {step}: finite is {finite}");
    }
    Ok(())
}

/// One rank's scaler would skip a step in which the others wait.
fn scalers(group: &ProcessGroup) -> Result<()> {
    let param = Tensor::zeros([2], (Kind::Float, Device::Cpu));
    let opt = OneBitAdam::new(group, [param], OneBitAdamOptions::default())?;
    ensure!(opt.behavior().communicates);
    Ok(())
}

/// A `VarStore` gives its frozen parameters, too.
fn frozen(group: &ProcessGroup) -> Result<()> {
    let ones = || Tensor::ones([2], (Kind::Float, Device::Cpu));
    let (trained, frozen) = (ones().set_requires_grad(true), ones());
    let options = OneBitAdamOptions { weight_decay: 0.5, lr: 0.1, ..Default::default() };
    let mut opt = OneBitAdam::new(group, [&frozen, &trained], options)?;
    trained.sum(Kind::Float).backward();
    opt.step()?;
    ensure!(frozen == ones() && trained != ones(), "{frozen} {trained}");
    let told = OneBitAdam::new(group, [&trained, &trained], options).map(drop);
    ensure!(told.is_err_and(|error| error.to_string().contains("it is given twice")));
    Ok(())
}

/// A cyclic schedule sets beta1, and the state contains it.
fn momentum(group: &ProcessGroup) -> Result<()> {
    let new = || OneBitAdam::new(group, [Tensor::zeros([2], (Kind::Float, Device::Cpu))], OneBitAdamOptions::default());
    let (mut opt, mut other) = (new()?, new()?);
    ensure!(opt.momentum(0) == Some(0.9) && opt.momentum(1).is_none());
    opt.set_momentum(0, 0.85)?;
    ensure!(opt.set_momentum(0, 1.0).is_err() && opt.set_momentum(1, 0.5).is_err());
    other.load_state_dict(&opt.state_dict()?)?;
    ensure!(other.momentum(0) == Some(0.85));
    Ok(())
}

/// Signs would move every parameter; those without a gradient in the warm-up do not move.
fn unreached(group: &ProcessGroup) -> Result<()> {
    let param = Tensor::ones([10], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let mut opt =
        OneBitAdam::new(group, [param.shallow_clone()], OneBitAdamOptions { freeze_step: 2, ..Default::default() })?;
    for _ in 0..6 {
        param.narrow(0, 0, 5).square().sum(Kind::Float).backward();
        opt.step()?;
        opt.zero_grad()?;
    }
    let values = Vec::<f32>::try_from(param.detach())?;
    ensure!(values[..5].iter().all(|value| (0.9..1.0).contains(value)) && values[5..] == [1.0; 5], "{values:?}");
    Ok(())
}

/// Refused before anything is sent, naming the parameter by its index: the other rank's step is not affected.
fn sparse(group: &ProcessGroup) -> Result<()> {
    let bias = Tensor::ones([4], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let weights = Tensor::ones([10, 4], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let params = [bias.shallow_clone(), weights.shallow_clone()];
    let mut opt = OneBitAdam::new(group, &params, OneBitAdamOptions::default())?;
    if group.rank() == 0 {
        let rows = Tensor::embedding(&weights, &Tensor::from_slice(&[1i64, 7]), -1, false, true);
        (rows + &bias).sum(Kind::Float).backward();
        let told = opt.step();
        let named = matches!(&told, Err(OptimizerError::InvalidParameter { parameter, reason }) if parameter == "number 1" && reason.contains("sparse"));
        ensure!(named, "{told:?}");
        opt.zero_grad()?;
    }
    ((&weights * 2) + &bias).sum(Kind::Float).backward();
    opt.step()?;
    Ok(())
}

fn refusals(group: &ProcessGroup) -> Result<()> {
    let options = OneBitAdamOptions::default();
    // One number more on the second rank is an error on every rank.
    let uneven = Tensor::zeros([3 + group.rank() as i64], (Kind::Float, Device::Cpu));
    let told = OneBitAdam::new(group, [uneven], options).map(drop).map_err(|error| error.to_string());
    ensure!(told.as_ref().is_err_and(|said| said.contains("1 with 4 numbers")), "{told:?}");
    for (params, named) in [
        (vec![Tensor::zeros([2], (Kind::Int64, Device::Cpu))], "should be of float32"),
        (vec![Tensor::zeros([2], (Kind::Half, Device::Cpu))], "should be of float32"),
        (vec![Tensor::new()], "undefined"),
        (vec![], "no parameters"),
    ] {
        let told = OneBitAdam::new(group, params, options).map(drop).map_err(|error| error.to_string());
        ensure!(told.as_ref().is_err_and(|said| said.contains(named)), "{told:?}");
    }
    let never = OneBitAdamOptions { freeze_step: 0, ..options };
    let param = Tensor::zeros([2], (Kind::Float, Device::Cpu));
    ensure!(OneBitAdam::new(group, [param], never).is_err_and(|error| error.to_string().starts_with("freeze_step")));
    Ok(())
}
