//! What a scaler checks about its optimizers: whether their steps may be skipped, and whether to skip this one.

use overdrive_core::{Optimizer, OptimizerError, UNSCALED};
use tch::{Device, Kind, Tensor};

use crate::error::AmpError;
use crate::unscale::to_device;

/// Refuses an optimizer whose steps a scaler must not skip.
pub(super) fn check_behavior<O: Optimizer + ?Sized>(optimizer: &O) -> Result<(), OptimizerError> {
    let behavior = optimizer.behavior();
    let refuse = |reason| Err(OptimizerError::DoesNotFit { part: "GradScaler", reason });
    if behavior.steps_in_backward {
        return refuse(
            "it steps during the backward pass, before all gradients could be checked for infinities; train in \
             bfloat16, which needs no scaler",
        );
    }
    if behavior.communicates && optimizer.skip_agreement().is_none() {
        return refuse(
            "it averages over ranks in its steps, so the other ranks would hang when one rank skips a step; train in \
             bfloat16, which needs no scaler",
        );
    }
    Ok(())
}

/// The flags of this rank's gradients, or one flag that is the same on all ranks, where the optimizer's ranks skip steps
/// together.
pub(super) fn agreed<O: Optimizer + ?Sized>(
    optimizer: &O,
    flags: Result<Vec<Tensor>, AmpError>,
    device: Device,
) -> Result<Vec<Tensor>, AmpError> {
    let Some(ranks) = optimizer.skip_agreement() else { return flags };
    let flag = match &flags {
        // A rank without gradients takes part too; for one that refuses a gradient, the others skip the step.
        Ok(none) if none.is_empty() => Tensor::f_zeros([], (Kind::Float, device))?,
        Ok(flags) => combined(flags, device, "unscale_")?.f_detach_copy()?,
        Err(_) => Tensor::f_ones([], (Kind::Float, device))?,
    };
    ranks.agree(&flag).map_err(OptimizerError::Sync)?;
    flags.map(|_| vec![flag])
}

/// Combines the flags of several devices and optimizers into one of 0 or 1 (their maximum, not their sum: fused kernels
/// compare it with 1).
pub(super) fn combined<T: std::borrow::Borrow<Tensor>>(
    flags: &[T],
    device: Device,
    call: &'static str,
) -> Result<Tensor, AmpError> {
    let [first, rest @ ..] = flags else { return Err(AmpError::NoGradients { call }) };
    let mut either = to_device(first.borrow(), device)?;
    for flag in rest {
        either = either.f_maximum(&to_device(flag.borrow(), device)?)?;
    }
    Ok(either)
}

/// Refuses a gradient that is still scaled because its parameter was added to the optimizer after `unscale_`.
pub(super) fn check_all_unscaled<O: Optimizer + ?Sized>(optimizer: &O) -> Result<(), AmpError> {
    let is_scaled = |param: &Tensor| !UNSCALED.contains(param) && param.grad().defined();
    if optimizer.params().iter().any(is_scaled) { Err(AmpError::AddedAfterUnscale) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use overdrive_ffi::{Arg, LazyOp, TensorList};

    use super::*;

    #[test]
    fn two_set_flags_combine_to_one_that_makes_a_fused_kernel_skip() {
        let flag = |value: f32| Tensor::from(value);
        let both = combined(&[flag(1.0), flag(1.0)], Device::Cpu, "step").unwrap();
        assert_eq!(both.double_value(&[]), 1.0);
        let (param, grad) = (Tensor::from_slice(&[2f32]), Tensor::from_slice(&[5f32]));
        LazyOp::new("aten::_fused_sgd_", "")
            .call(&[
                Arg::TensorList(&TensorList::new(&[&param]).unwrap()),
                Arg::TensorList(&TensorList::new(&[&grad]).unwrap()),
                Arg::TensorList(&TensorList::new::<Tensor>(&[]).unwrap()),
                Arg::Double(0.0),
                Arg::Double(0.0),
                Arg::Double(0.1),
                Arg::Double(0.0),
                Arg::Bool(false),
                Arg::Bool(false),
                Arg::Bool(false),
                None.into(),
                Some(&both).into(),
            ])
            .unwrap();
        assert_eq!(param.double_value(&[0]), 2.0, "the step is skipped");
    }
}
