//! Tensors that stay as they are.

use std::collections::HashSet;
use std::sync::Arc;

use overdrive_ffi::{SyncTensor, storage};
use tch::Tensor;

/// Storages by their addresses. It shares them, so that no other tensor gets these addresses.
#[derive(Default)]
pub(super) struct LeftAlone {
    addresses: HashSet<usize>,
    shared: Vec<Arc<SyncTensor>>,
}

impl LeftAlone {
    /// These too.
    pub(super) fn and<'a>(&self, tensors: impl IntoIterator<Item = &'a Tensor>) -> Self {
        let (mut addresses, mut shared) = (self.addresses.clone(), self.shared.clone());
        for tensor in tensors {
            // What has no storage has no other form either.
            if let Ok(storage) = storage(tensor) {
                addresses.insert(storage.address);
                shared.push(Arc::new(SyncTensor(tensor.detach())));
            }
        }
        Self { addresses, shared }
    }

    pub(super) fn contains(&self, address: &usize) -> bool {
        self.addresses.contains(address)
    }
}
