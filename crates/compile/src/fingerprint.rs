//! What a compiled step relies on in a model: the identity of its tensors, which of them are trained, and the modes of
//! its layers.

use std::hash::{DefaultHasher, Hash, Hasher};

use overdrive_core::{Module, ModuleId, ModuleState, Visitor};
use overdrive_ffi::{Form, TensorId};
use tch::Tensor;

/// A number that changes when a parameter or buffer is replaced, moved, cast, frozen or unfrozen, or a layer changes its
/// mode.
pub(crate) fn fingerprint<M: Module>(model: &M) -> u64 {
    let mut parts = Parts { hasher: DefaultHasher::new(), around: model.id().into_iter().collect() };
    model.visit(&mut parts);
    parts.hasher.finish()
}

struct Parts {
    hasher: DefaultHasher,
    /// The modules that this one is a part of.
    around: Vec<ModuleId>,
}

impl<'a> Visitor<'a> for Parts {
    fn parameter(&mut self, _name: &str, parameter: &Tensor) {
        (TensorId::of(parameter), parameter.requires_grad()).hash(&mut self.hasher);
        Form::of(parameter).hash(&mut self.hasher);
    }

    fn buffer(&mut self, _name: &str, buffer: &Tensor, _persistent: bool) {
        TensorId::of(buffer).hash(&mut self.hasher);
        Form::of(buffer).hash(&mut self.hasher);
    }

    fn module(&mut self, _name: &str, module: &'a dyn Module) {
        if module.id().is_some_and(|id| self.around.contains(&id)) {
            return;
        }
        let depth = self.around.len();
        self.around.extend(module.id());
        module.visit(self);
        self.around.truncate(depth);
    }

    fn state(&mut self, state: &'a ModuleState) {
        state.is_training().hash(&mut self.hasher);
    }
}
