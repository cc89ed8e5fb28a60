//! The gradient of the loss that a compiled loss computes its gradients with.

use overdrive_core::TorchError;
use tch::{Device, Kind, Tensor};

/// A tensor that compiled code reads: the gradient that the last backward pass has brought, at first 1. So the scale of a
/// `GradScaler` is in the gradients from the first operator on, and small ones do not vanish in float16.
#[derive(Debug)]
pub(crate) struct Seed(Tensor);

impl Seed {
    pub(crate) fn new(device: Device) -> Result<Self, TorchError> {
        Ok(Self(Tensor::f_ones([], (Kind::Double, device))?))
    }

    /// As the gradient of this loss.
    pub(crate) fn of(&self, loss: &Tensor) -> Result<Tensor, TorchError> {
        Ok(self.0.f_to_device(loss.device())?.f_to_kind(loss.kind())?.f_reshape(loss.size())?)
    }

    /// What gradients that are computed now are computed with.
    pub(crate) fn used(&self) -> Result<Used, TorchError> {
        let value = match self.0.device() {
            Device::Cpu => Value::Host(self.0.f_double_value(&[])?),
            _ => Value::Device(self.0.f_to_dtype(Kind::Double, false, true)?),
        };
        Ok(Used { value, seed: Self(self.0.shallow_clone()) })
    }
}

/// What some gradients were computed with.
#[derive(Debug)]
pub(crate) struct Used {
    value: Value,
    seed: Seed,
}

#[derive(Debug)]
enum Value {
    Host(f64),
    /// So that the host does not wait.
    Device(Tensor),
}

impl Used {
    /// What the gradients have to be multiplied by for this gradient of the loss, `None` if by 1. Later ones are computed
    /// with it.
    pub(crate) fn factor(&self, of_loss: &Tensor) -> Result<Option<Tensor>, TorchError> {
        let _no_grad = tch::no_grad_guard();
        let mut next = self.seed.0.shallow_clone();
        let of_loss = of_loss.f_reshape([])?;
        match &self.value {
            Value::Host(used) => {
                let now = of_loss.f_double_value(&[])?;
                if now.is_finite() && now != 0.0 {
                    next.f_copy_(&of_loss)?;
                }
                Ok((now != *used).then(|| Tensor::from(now / used)))
            }
            Value::Device(used) => {
                let now = of_loss.f_to_device(next.device())?.f_to_kind(Kind::Double)?;
                let factor = now.f_div(used)?;
                let is_usable = factor.f_isfinite()?.f_logical_and(&factor.f_ne(0.0)?)?;
                let usable = now.f_where_self(&is_usable, &next)?;
                next.f_copy_(&usable)?;
                Ok(Some(factor))
            }
        }
    }
}
