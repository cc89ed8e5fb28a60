//! Divides gradients by the scale and looks for infinities and NaN, with one call per device and dtype.

use overdrive_core::Optimizer;
use overdrive_ffi::{Arg, LazyOp, TensorList};
use tch::{Device, Kind, Tensor};

use crate::error::AmpError;

static NON_FINITE_CHECK_AND_UNSCALE: LazyOp = LazyOp::new("aten::_amp_foreach_non_finite_check_and_unscale_", "");

/// What to do with float16 gradients.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Half {
    /// An error, because unscaling in float16 loses bits.
    Refused,
    /// Accepted, because they are only checked for infinities.
    Allowed,
}

/// Multiplies every gradient by `inv_scale` and returns one flag per device: 1 when a gradient there is not finite.
///
/// Nothing is changed when a gradient is refused.
pub(crate) fn unscale<O: Optimizer + ?Sized>(
    optimizer: &O,
    inv_scale: &Tensor,
    half: Half,
) -> Result<Vec<Tensor>, AmpError> {
    let _no_grad = tch::no_grad_guard();
    let mut flags: Vec<(Device, Tensor)> = Vec::new();
    for ((device, _), grads) in by_device_and_kind(optimizer, half)? {
        let found_inf = match flags.iter().position(|(known, _)| *known == device) {
            Some(place) => &flags[place].1,
            None => {
                flags.push((device, Tensor::f_zeros([], (Kind::Float, device))?));
                &flags[flags.len() - 1].1
            }
        };
        let inv_scale = to_device(inv_scale, device)?;
        let grads = TensorList::new(&grads)?;
        NON_FINITE_CHECK_AND_UNSCALE.call(&[
            Arg::TensorList(&grads),
            Arg::Tensor(found_inf),
            Arg::Tensor(&inv_scale),
        ])?;
    }
    Ok(flags.into_iter().map(|(_, flag)| flag).collect())
}

type Groups = Vec<((Device, Kind), Vec<Tensor>)>;

fn by_device_and_kind<O: Optimizer + ?Sized>(optimizer: &O, half: Half) -> Result<Groups, AmpError> {
    let mut groups = Groups::new();
    for (index, param) in optimizer.params().iter().enumerate() {
        let grad = param.f_grad()?;
        if !grad.defined() {
            continue;
        }
        if half == Half::Refused && grad.kind() == Kind::Half {
            let parameter = optimizer.parameters().get(index).map(|param| param.label(index)).unwrap_or_default();
            return Err(AmpError::HalfGradient { parameter });
        }
        let grad = if grad.is_sparse() { grad.f_internal_values()? } else { grad };
        let key = (grad.device(), grad.kind());
        match groups.iter_mut().find(|(known, _)| *known == key) {
            Some((_, grads)) => grads.push(grad),
            None => groups.push((key, vec![grad])),
        }
    }
    Ok(groups)
}

/// The tensor on `device`; the same storage when it is there already.
///
/// Copies to a GPU are asynchronous. A copy to the host blocks, or it could be read before it has arrived.
pub(crate) fn to_device(tensor: &Tensor, device: Device) -> Result<Tensor, AmpError> {
    Ok(tensor.f_to_device_(device, tensor.kind(), device.is_cuda(), false)?)
}
