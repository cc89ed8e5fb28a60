//! Tensors that threads share.

use std::ops::{Deref, DerefMut};

use tch::Tensor;

/// A tensor that is `Sync`, so that a module can be shared between threads.
#[derive(Debug)]
pub struct SyncTensor(pub Tensor);

// SAFETY: this allows nothing new. tch makes tensors `Send`, and `shallow_clone` makes two handles of one tensor, so
// threads can use one tensor at the same time anyway. libtorch counts references atomically; what writes must not run
// beside what reads the same tensor, as for any two handles.
unsafe impl Sync for SyncTensor {}

impl Deref for SyncTensor {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.0
    }
}

impl DerefMut for SyncTensor {
    fn deref_mut(&mut self) -> &mut Tensor {
        &mut self.0
    }
}
