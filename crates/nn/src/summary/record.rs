//! What layers report while [`summary`](super::summary) runs a model.

use std::cell::RefCell;
use std::collections::HashMap;
use std::marker::PhantomData;

use overdrive_core::{Module, ModuleId};
use tch::Tensor;

/// A module; or a part of a module by its place, which also activations have.
type Place = (ModuleId, Option<usize>);

/// The outputs of modules, in the order in which they were computed.
pub(crate) type Outputs = HashMap<Place, Vec<Output>>;

thread_local! {
    static OUTPUTS: RefCell<Option<Outputs>> = const { RefCell::new(None) };
}

/// The output of a module.
#[derive(Clone, Debug)]
pub(crate) struct Output {
    pub size: Vec<i64>,
    pub bytes: usize,
}

impl Output {
    pub fn of(tensor: &Tensor) -> Self {
        Self { size: tensor.size(), bytes: tensor.numel() * tensor.kind().elt_size_in_bytes() }
    }
}

/// What a layer can return: its first tensor is its output.
pub(crate) trait FirstTensor {
    fn first(&self) -> &Tensor;
}

impl FirstTensor for Tensor {
    fn first(&self) -> &Tensor {
        self
    }
}

impl<T> FirstTensor for (Tensor, T) {
    fn first(&self) -> &Tensor {
        &self.0
    }
}

/// Reports the output of a module, or of one of its parts.
pub(crate) fn report<M: Module + ?Sized>(module: &M, part: Option<usize>, output: &impl FirstTensor) {
    OUTPUTS.with_borrow_mut(|outputs| {
        if let (Some(outputs), Some(id)) = (outputs, module.id()) {
            outputs.entry((id, part)).or_default().push(Output::of(output.first()));
        }
    });
}

/// Layers of this thread report as long as this lives.
pub(crate) struct Recording {
    before: Option<Outputs>,
    not_send: PhantomData<*const ()>,
}

impl Recording {
    pub fn start() -> Self {
        Self { before: OUTPUTS.replace(Some(Outputs::default())), not_send: PhantomData }
    }

    /// What was reported.
    pub fn outputs(&self) -> Outputs {
        OUTPUTS.with_borrow_mut(|outputs| outputs.as_mut().map(std::mem::take).unwrap_or_default())
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        OUTPUTS.set(self.before.take());
    }
}
