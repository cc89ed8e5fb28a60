//! What a compiled step relies on outside of its batch: the identity of a model's tensors, which of them are trained, the
//! modes of its layers, their numbers that can change, and autocast.

use std::fmt::{self, Debug, Formatter};
use std::hash::{DefaultHasher, Hash, Hasher};

use overdrive_core::{Module, ModuleId, ModuleState, Visitor};
use overdrive_ffi::{Form, TensorId, autocast};
use tch::{Device, Tensor};

/// The modules that a step relies on: its model, and those that are watched besides.
pub(crate) struct Watched<'m>(Vec<&'m dyn Module>);

impl<'m> Watched<'m> {
    pub(crate) fn new(model: &'m dyn Module) -> Self {
        Self(vec![model])
    }

    pub(crate) fn add(&mut self, module: &'m dyn Module) {
        self.0.push(module);
    }

    /// A number that changes when a parameter or buffer is replaced, moved, cast, frozen or unfrozen, a layer changes its
    /// mode or a value in a `Cell`, or an autocast region around the step begins or ends.
    pub(crate) fn fingerprint(&self) -> u64 {
        let mut parts = Parts { hasher: DefaultHasher::new(), around: Vec::new() };
        for device in [Device::Cpu, Device::Cuda(0)] {
            autocast::state(device).ok().hash(&mut parts.hasher);
        }
        self.0.iter().for_each(|module| parts.module("", *module));
        parts.hasher.finish()
    }
}

impl Debug for Watched<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|module| module.describe())).finish()
    }
}

struct Parts {
    hasher: DefaultHasher,
    /// The modules that this one is a part of.
    around: Vec<ModuleId>,
}

impl<'a> Visitor<'a> for Parts {
    fn parameter(&mut self, _name: &str, parameter: &Tensor) {
        (TensorId::of(parameter), parameter.requires_grad()).hash(&mut self.hasher);
        Form::of(parameter).ok().hash(&mut self.hasher);
    }

    fn buffer(&mut self, _name: &str, buffer: &Tensor, _persistent: bool) {
        TensorId::of(buffer).hash(&mut self.hasher);
        Form::of(buffer).ok().hash(&mut self.hasher);
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

    fn cell(&mut self, _name: &str, value: &dyn Debug) {
        format!("{value:?}").hash(&mut self.hasher);
    }
}
