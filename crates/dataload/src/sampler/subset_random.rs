//! Random orders of some of the samples.

use crate::permutation::shuffle;
use crate::{DataError, Generator, Philox, Sampler};

/// Some of the samples, once each, in a new random order in each epoch.
///
/// Two lists of equal length are permuted in the same way under the same seed and epoch.
///
/// # Source
/// `torch.utils.data.SubsetRandomSampler`.
#[derive(Clone, Debug)]
pub struct SubsetRandomSampler {
    indices: Vec<usize>,
    seed: u64,
}

impl SubsetRandomSampler {
    /// Permutations of `indices`.
    pub fn new(indices: impl Into<Vec<usize>>, seed: u64) -> Self {
        Self { indices: indices.into(), seed }
    }

    /// Fails when an index is out of range for a dataset of `len` samples, which the loader would only notice on
    /// reaching it.
    ///
    /// # Errors
    /// [`DataError::IndexOutOfRange`] for the first such index.
    pub fn within(self, len: usize) -> Result<Self, DataError> {
        match self.indices.iter().find(|&&index| index >= len) {
            Some(&index) => Err(DataError::IndexOutOfRange { index, len }),
            None => Ok(self),
        }
    }
}

impl Sampler for SubsetRandomSampler {
    fn len(&self) -> usize {
        self.indices.len()
    }

    fn order(&self, epoch: u64) -> Vec<usize> {
        let (mut order, mut bits) = (self.indices.clone(), Philox::new(self.seed, epoch).bits());
        shuffle(&mut order, || bits.draw());
        order
    }

    fn order_from(&self, _epoch: u64, generator: &mut Generator) -> Result<Vec<usize>, DataError> {
        Ok(generator.randperm(self.indices.len()).into_iter().map(|place| self.indices[place]).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RandomSampler;

    #[test]
    fn a_subset_is_permuted_as_its_positions_are() -> Result<(), DataError> {
        let indices: Vec<usize> = (0..100).map(|i| 7 * i + 3).collect();
        let sampler = SubsetRandomSampler::new(indices.clone(), 5).within(697)?;
        let expected: Vec<usize> = RandomSampler::new(100, 5).order(2).into_iter().map(|i| indices[i]).collect();
        assert_eq!((sampler.order(2), sampler.len()), (expected, 100));
        assert!(matches!(sampler.within(696), Err(DataError::IndexOutOfRange { index: 696, len: 696 })));
        assert!(SubsetRandomSampler::new([], 0).order(0).is_empty());
        Ok(())
    }
}
