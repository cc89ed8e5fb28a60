//! How a function behaves under autocast.

use std::mem::discriminant;

use overdrive_ffi::Error as TorchError;
use overdrive_ffi::autocast::{self, Region, State};
use tch::{Device, Kind, Tensor};

/// What autocast does to a [`Function`](super::Function): backward runs with the state that forward had.
///
/// Otherwise forward runs with the caller's state, and backward with that of the thread that runs the pass.
///
/// # Source
/// `torch.amp.custom_fwd` together with `torch.amp.custom_bwd`
#[derive(Clone, Copy, Debug)]
#[doc(alias = "custom_bwd")]
pub struct CustomFwd {
    device: Device,
    cast_inputs: Option<Kind>,
}

impl CustomFwd {
    /// For autocast of this type of device; the device's index does not matter.
    pub const fn new(device: Device) -> Self {
        Self { device, cast_inputs: None }
    }

    /// In an autocast region, forward gets its inputs in this dtype and runs without autocast; so does backward. Only
    /// floating-point inputs on the device that are not float64 are converted.
    pub const fn cast_inputs(self, kind: Kind) -> Self {
        Self { cast_inputs: Some(kind), ..self }
    }

    /// Runs a forward pass; returns the state for its backward pass too.
    pub(super) fn forward<R>(
        self,
        inputs: &[&Tensor],
        run: impl FnOnce(&[&Tensor]) -> R,
    ) -> Result<(R, Autocast), TorchError> {
        let now = autocast::state(self.device)?;
        let off = Autocast { device: self.device, state: State { enabled: false, ..now } };
        match self.cast_inputs {
            None => Ok((run(inputs), Autocast { state: now, ..off })),
            Some(_) if !now.enabled => Ok((run(inputs), off)),
            Some(kind) => {
                let (_region, _no_grad) = (off.enter()?, tch::no_grad_guard());
                let cast: Vec<_> = inputs.iter().map(|input| self.cast(input, kind)).collect::<Result<_, _>>()?;
                Ok((run(&cast.iter().collect::<Vec<_>>()), off))
            }
        }
    }

    fn cast(self, input: &Tensor, kind: Kind) -> Result<Tensor, TorchError> {
        let is_cast = input.defined()
            && discriminant(&input.device()) == discriminant(&self.device)
            && matches!(input.f_kind()?, Kind::Half | Kind::BFloat16 | Kind::Float);
        Ok(if is_cast { input.f_to_kind(kind)? } else { input.shallow_clone() })
    }
}

/// Autocast's state for one type of device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Autocast {
    device: Device,
    state: State,
}

impl Autocast {
    pub(super) fn enter(self) -> Result<Region, TorchError> {
        Region::enter(self.device, self.state)
    }
}
