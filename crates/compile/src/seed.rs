//! The gradient of the loss that a compiled loss computes its gradients with.

use overdrive_core::TorchError;
use tch::{Device, Kind, Tensor};

/// What is left of it at least, from pass to pass.
const FALL: f64 = 0.5;

/// A tensor that compiled code reads: the gradient that the last backward pass has brought, at first 1. So the scale of a
/// `GradScaler` is in the gradients from the first operator on, and small ones do not vanish in float16.
///
/// It falls by half at most from pass to pass: after a loss with a tiny weight, the next one may have its whole weight
/// again, and its gradients would vanish. Half is what a `GradScaler` takes off after an overflow.
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
                    let floor = next.f_double_value(&[])?.abs() * FALL;
                    next.f_copy_(&Tensor::from(if now.abs() < floor { floor } else { now }))?;
                }
                Ok((now != *used).then(|| Tensor::from(now / used)))
            }
            Value::Device(used) => {
                let now = of_loss.f_to_device(next.device())?.f_to_kind(Kind::Double)?;
                let factor = now.f_div(used)?;
                let is_usable = factor.f_isfinite()?.f_logical_and(&factor.f_ne(0.0)?)?;
                let floor = next.f_abs()?.f_mul(&Tensor::from(FALL))?;
                let slow = now.f_where_self(&now.f_abs()?.f_ge_tensor(&floor)?, &floor)?;
                let usable = slow.f_where_self(&is_usable, &next)?;
                next.f_copy_(&usable)?;
                Ok(Some(factor))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The seeds that steps are computed with whose gradients are these.
    fn seeds(of_losses: &[f64]) -> Vec<f64> {
        let seed = Seed::new(Device::Cpu).unwrap();
        let one = |of_loss: &f64| {
            let used = seed.used().unwrap();
            let before = seed.0.double_value(&[]);
            let factor = used.factor(&Tensor::from(*of_loss)).unwrap();
            assert_eq!(factor.map_or(1.0, |factor| factor.double_value(&[])), of_loss / before);
            before
        };
        of_losses.iter().map(one).collect()
    }

    #[test]
    fn the_seed_follows_the_scale_and_a_tiny_weight_does_not_take_it_away() {
        assert_eq!(seeds(&[65536.0, 32768.0, 65536.0, -65536.0, 1.0]), [1.0, 65536.0, 32768.0, 65536.0, -65536.0]);
        assert_eq!(seeds(&[1e-6, 1.0, 1e-6, 1.0]), [1.0, 0.5, 1.0, 0.5]);
        assert_eq!(seeds(&[0.25, 0.25, 0.25, 0.25]), [1.0, 0.5, 0.25, 0.25]);
        assert_eq!(seeds(&[8.0, f64::INFINITY, 0.0, 8.0]), [1.0, 8.0, 8.0, 8.0]);
    }
}
