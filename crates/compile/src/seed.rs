//! The gradient of the loss that a compiled loss computes its gradients with.

use overdrive_core::TorchError;
use tch::{Device, Kind, Tensor};

/// A tensor that compiled code reads: at first 1, then the gradient that the last backward pass has brought. So the scale of
/// a `GradScaler` is in the gradients from the first operator on, and small ones do not vanish in float16.
///
/// It follows at once where that is between half of it and twice it, as a `GradScaler`'s scale is. Otherwise the loss had
/// another weight than usual: then it is the larger one of the last two, so that a single tiny weight does not take the
/// precision of the next gradients away, and a single large one stays for one more pass alone.
#[derive(Debug)]
pub(crate) struct Seed {
    now: Tensor,
    /// The gradient of the loss before the last one; NaN at first.
    before: Tensor,
}

impl Seed {
    pub(crate) fn new(device: Device) -> Result<Self, TorchError> {
        let now = Tensor::f_ones([], (Kind::Double, device))?;
        let before = Tensor::from(f64::NAN).f_to_device(device)?;
        Ok(Self { now, before })
    }

    /// As the gradient of this loss.
    pub(crate) fn of(&self, loss: &Tensor) -> Result<Tensor, TorchError> {
        Ok(self.now.f_to_device(loss.device())?.f_to_kind(loss.kind())?.f_reshape(loss.size())?)
    }

    /// What gradients that are computed now are computed with.
    pub(crate) fn used(&self) -> Result<Used, TorchError> {
        let value = self.now.f_to_dtype(Kind::Double, false, true)?;
        let seed = Self { now: self.now.shallow_clone(), before: self.before.shallow_clone() };
        Ok(Used { value, seed })
    }

    /// Takes the gradient of a loss, of which `usable` says whether it is a number above or below 0.
    fn follow(&mut self, of_loss: &Tensor, usable: &Tensor) -> Result<(), TorchError> {
        let (size, own) = (of_loss.f_abs()?, self.now.f_abs()?);
        let twice = own.f_add(&own)?;
        let is_near = size.f_add(&size)?.f_ge_tensor(&own)?.f_logical_and(&size.f_le_tensor(&twice)?)?;
        let is_first = self.before.f_isnan()?;
        // Larger than NaN is the other one.
        let larger = size.f_fmax(&self.before.f_abs()?)?;
        let next = of_loss.f_where_self(&is_near.f_logical_or(&is_first)?, &larger)?;
        let next = next.f_where_self(usable, &self.now)?;
        let before = of_loss.f_where_self(usable, &self.before)?;
        self.now.f_copy_(&next)?;
        self.before.f_copy_(&before)?;
        Ok(())
    }
}

/// What some gradients were computed with.
#[derive(Debug)]
pub(crate) struct Used {
    value: Tensor,
    seed: Seed,
}

impl Used {
    /// What the gradients have to be multiplied by for this gradient of the loss, `None` if by 1. Later ones are computed
    /// with it. Does not wait for a device, where it is never `None`.
    pub(crate) fn factor(&self, of_loss: &Tensor) -> Result<Option<Tensor>, TorchError> {
        let _no_grad = tch::no_grad_guard();
        let Self { value, seed } = self;
        let mut seed = Seed { now: seed.now.shallow_clone(), before: seed.before.shallow_clone() };
        let now = of_loss.f_reshape([])?.f_to_device(seed.now.device())?.f_to_kind(Kind::Double)?;
        let factor = now.f_div(value)?;
        let usable = factor.f_isfinite()?.f_logical_and(&factor.f_to_kind(Kind::Bool)?)?;
        seed.follow(&now, &usable)?;
        let is_one = factor.device() == Device::Cpu && factor.f_double_value(&[])? == 1.0;
        Ok((!is_one).then_some(factor))
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
            let before = seed.now.double_value(&[]);
            let factor = used.factor(&Tensor::from(*of_loss)).unwrap();
            assert_eq!(factor.map_or(1.0, |factor| factor.double_value(&[])), of_loss / before);
            before
        };
        of_losses.iter().map(one).collect()
    }

    #[test]
    fn the_seed_follows_the_scale_and_not_a_single_weight() {
        assert_eq!(seeds(&[65536.0, 32768.0, 65536.0, -65536.0, 1.0]), [1.0, 65536.0, 32768.0, 65536.0, -65536.0]);
        // A tiny weight in turns, and a large one once.
        assert_eq!(seeds(&[1.0, 1e-6, 1.0, 1e-6, 1.0]), [1.0, 1.0, 1.0, 1.0, 1.0]);
        assert_eq!(seeds(&[1e-6, 1.0, 1e-6, 1.0]), [1.0, 1e-6, 1.0, 1.0]);
        assert_eq!(seeds(&[8.0, 8192.0, 8.0, 8.0, 8.0]), [1.0, 8.0, 8192.0, 8192.0, 8.0]);
        assert_eq!(seeds(&[0.25, 0.25, 0.25, 0.25]), [1.0, 0.25, 0.25, 0.25]);
        assert_eq!(seeds(&[8.0, f64::INFINITY, 0.0, 8.0]), [1.0, 8.0, 8.0, 8.0]);
    }
}
