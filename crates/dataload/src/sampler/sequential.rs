//! The dataset's own order.

use crate::Sampler;

/// Every sample in the dataset's order.
///
/// # Source
/// `torch.utils.data.SequentialSampler`.
#[derive(Clone, Copy, Debug)]
pub struct SequentialSampler {
    len: usize,
}

impl SequentialSampler {
    /// The indices 0 to `len - 1`.
    pub fn new(len: usize) -> Self {
        Self { len }
    }
}

impl Sampler for SequentialSampler {
    fn len(&self) -> usize {
        self.len
    }

    fn order(&self, _epoch: u64) -> Vec<usize> {
        (0..self.len).collect()
    }
}
