//! A `VarStore` of tch as a module.

use std::any::Any;
use std::collections::HashMap;

use overdrive_ffi::TensorId;
use tch::nn::VarStore;

use crate::growth::Growth;
use crate::module::{Module, Visitor};
use crate::module_state::{load_module_state, module_state};
use crate::state::{StateDict, StateError, Stateful};

/// The trainable variables, frozen ones among them, are the parameters, in the order in which they were made; the others
/// are buffers, in the order of their names. Their initial values are tch's, which differ from PyTorch's.
impl Module for VarStore {
    fn visit<'a>(&'a self, visitor: &mut dyn Visitor<'a>) {
        let mut variables: Vec<_> = self.variables().into_iter().collect();
        variables.sort_by(|(one, _), (other, _)| one.cmp(other));
        // A variable and its entry among the trainable ones are handles of one tensor.
        let mut names: HashMap<_, _> = variables.iter().map(|(name, it)| (TensorId::of(it), name.clone())).collect();
        for (index, tensor) in self.trainable_variables().into_iter().enumerate() {
            let name = names.remove(&TensorId::of(&tensor)).unwrap_or_else(|| index.to_string());
            visitor.parameter(&name, &tensor);
        }
        for (name, tensor) in variables.iter().filter(|(_, it)| names.contains_key(&TensorId::of(it))) {
            visitor.buffer(name, tensor, true);
        }
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }

    fn growth(&self) -> Option<Growth> {
        Some(Growth::of(self))
    }
}

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
        module_state(self)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        load_module_state(self, state)
    }
}
