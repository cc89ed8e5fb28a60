//! Leaves a model as it was.

use overdrive_core::{Module, ModuleState, layer_states};
use tch::{TchError, Tensor};

/// Gives the modules of a model their modes and the buffers their values back when it is dropped.
pub(super) struct Unchanged<'a> {
    modes: Vec<(&'a ModuleState, bool)>,
    buffers: Vec<(Tensor, Tensor)>,
}

impl<'a> Unchanged<'a> {
    pub fn new<M: Module>(model: &'a M) -> Result<Self, TchError> {
        let _no_grad = tch::no_grad_guard();
        let copied = |(_, buffer): (String, Tensor)| Ok((buffer.f_detach_copy()?, buffer));
        let buffers = model.named_buffers().into_iter().map(copied).collect::<Result<_, TchError>>()?;
        Ok(Self { modes: layer_states(model).into_iter().map(|state| (state, state.is_training())).collect(), buffers })
    }
}

impl Drop for Unchanged<'_> {
    fn drop(&mut self) {
        let _no_grad = tch::no_grad_guard();
        for (state, training) in &self.modes {
            state.set_training(*training);
        }
        for (before, buffer) in &mut self.buffers {
            if !before.f_equal(buffer).unwrap_or(false) {
                // Of equal shape, dtype and device.
                let _ = buffer.f_copy_(before);
            }
        }
    }
}
