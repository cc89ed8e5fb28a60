//! The tensors that a module owns.

use std::ops::{Deref, DerefMut};

use overdrive_core::{Part, Visitor};
use overdrive_ffi::{Error as TorchError, SyncTensor};
use tch::Tensor;

/// A tensor that is trained: `named_parameters` lists it, and it requires a gradient.
///
/// # Source
/// `torch.nn.Parameter`
#[derive(Debug)]
pub struct Parameter(SyncTensor);

impl Parameter {
    /// Makes a leaf that requires a gradient, sharing the tensor's data.
    ///
    /// # Errors
    /// When the tensor is not floating-point or complex.
    pub fn new(tensor: &Tensor) -> Result<Self, TorchError> {
        Ok(Self(SyncTensor(tensor.f_detach()?.f_set_requires_grad(true)?)))
    }

    /// A parameter with the same values in memory of its own.
    ///
    /// # Errors
    /// When memory runs out.
    ///
    /// # Source
    /// `copy.deepcopy(parameter)`
    pub fn copied(&self) -> Result<Self, TorchError> {
        let copy = self.f_detach()?.f_detach_copy()?;
        Ok(Self(SyncTensor(copy.f_set_requires_grad(self.requires_grad())?)))
    }

    /// The same parameter once more, to tie two modules: it has both names, and is trained once.
    ///
    /// # Source
    /// `b.weight = a.weight`
    pub fn tie(&self) -> Self {
        Self(SyncTensor(self.shallow_clone()))
    }
}

/// A tensor that belongs to the model's state but is not trained, such as a running mean.
///
/// # Source
/// `torch.nn.Module.register_buffer`
#[derive(Debug)]
#[doc(alias = "register_buffer")]
pub struct Buffer {
    tensor: SyncTensor,
    persistent: bool,
}

impl Buffer {
    /// A buffer that is saved with the model.
    pub fn new(tensor: &Tensor) -> Self {
        Self { tensor: SyncTensor(tensor.shallow_clone()), persistent: true }
    }

    /// A buffer that is not saved.
    ///
    /// # Source
    /// `register_buffer(persistent=False)`
    pub fn not_persistent(tensor: &Tensor) -> Self {
        Self { persistent: false, ..Self::new(tensor) }
    }
}

impl Part for Parameter {
    fn show<'a>(&'a self, name: &str, visitor: &mut dyn Visitor<'a>) {
        visitor.parameter(name, &self.0);
    }
}

impl Part for Buffer {
    fn show<'a>(&'a self, name: &str, visitor: &mut dyn Visitor<'a>) {
        visitor.buffer(name, &self.tensor, self.persistent);
    }
}

impl Deref for Parameter {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.0
    }
}

impl DerefMut for Parameter {
    fn deref_mut(&mut self) -> &mut Tensor {
        &mut self.0
    }
}

impl Deref for Buffer {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.tensor
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut Tensor {
        &mut self.tensor
    }
}
