//! A model's weights as a state.

use tch::nn::VarStore;

use overdrive_ffi::Error as TorchError;

use crate::marks::MOVED;
use crate::state::{Entry, StateDict, StateError, Stateful};

/// Every variable by its name, buffers (a batch norm's running mean, say) among them.
///
/// While SAM has moved the weights, they can be neither saved nor loaded ([`StateError::NotSaved`]).
///
/// Loading copies into the existing tensors, so that the model and its optimizer keep using them.
///
/// # Source
/// `torch.nn.Module.state_dict`
impl Stateful for VarStore {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        let mut state = StateDict::new();
        let variables = self.variables();
        check_in_place(variables.values())?;
        for (name, tensor) in variables {
            state.insert(name, Entry::Tensor(tensor));
        }
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        let mut variables: Vec<_> = self.variables().into_iter().collect();
        variables.sort_by(|(one, _), (other, _)| one.cmp(other));
        // SAM's step would overwrite the loaded weights with those from before its ascent.
        check_in_place(variables.iter().map(|(_, own)| own))?;
        let check = |(name, own): &(String, _)| {
            let own: &tch::Tensor = own;
            state.tensor(name, &own.size(), own.kind()).map(tch::Tensor::shallow_clone)
        };
        let saved = variables.iter().map(check).collect::<Result<Vec<_>, _>>()?;
        state.refuse_unknown(&variables.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>())?;
        let _no_grad = tch::no_grad_guard();
        for ((_, own), saved) in variables.iter_mut().zip(&saved) {
            own.f_copy_(saved).map_err(TorchError::from)?;
        }
        Ok(())
    }
}

fn check_in_place<'a>(weights: impl IntoIterator<Item = &'a tch::Tensor>) -> Result<(), StateError> {
    let reason = "SAM's `ascend` has moved the weights: call `step` or `step_skipped` first, which move them back";
    if MOVED.position(weights).is_some() { Err(StateError::NotSaved { reason }) } else { Ok(()) }
}
