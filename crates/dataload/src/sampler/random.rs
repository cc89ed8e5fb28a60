//! Uniformly random orders.

use crate::permutation::permutations;
use crate::rng::below;
use crate::{DataError, Generator, Philox, Sampler};

/// Every sample once, in a new random order in each epoch; or a given number of random samples.
///
/// The permutation is a Fisher-Yates shuffle with the bits of [`Philox`] of (seed, epoch), one draw for two positions.
/// Its bias is below one in four million. An order of 1.2 million indices takes milliseconds, so it hardly delays the
/// first batch.
///
/// # Source
/// `torch.utils.data.RandomSampler`; the order itself differs from PyTorch's, unless
/// [`torch_order`](Self::torch_order) or the loader's [`generator`](crate::DataLoaderBuilder::generator) is set.
#[derive(Clone, Copy, Debug)]
pub struct RandomSampler {
    /// The dataset's length.
    of: usize,
    seed: u64,
    replacement: bool,
    num_samples: usize,
    torch_order: bool,
}

impl RandomSampler {
    /// Permutations of the indices 0 to `len - 1`.
    pub fn new(len: usize, seed: u64) -> Self {
        Self { of: len, seed, replacement: false, num_samples: len, torch_order: false }
    }

    /// Whether each index is drawn from all indices, so that it may repeat; off unless set.
    pub fn replacement(mut self, replacement: bool) -> Self {
        self.replacement = replacement;
        self
    }

    /// How many indices an epoch has; the dataset's length unless set.
    ///
    /// Without replacement, a longer epoch consists of whole permutations one after the other, the last one cut short.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for 0, or for an empty dataset.
    pub fn num_samples(mut self, num_samples: usize) -> Result<Self, DataError> {
        DataError::at_least_1("num_samples", num_samples)?;
        if self.of == 0 {
            return Err(DataError::option("num_samples", "0, since there is nothing to draw from", num_samples));
        }
        self.num_samples = num_samples;
        Ok(self)
    }

    /// Whether epoch `e` has the order that PyTorch draws with the seed `seed + e`; off unless set.
    ///
    /// This is how PyTorch's `DistributedSampler` shuffles: give this sampler to a
    /// [`DistributedSampler`](crate::DistributedSampler). Epoch 0 is that of `RandomSampler(.., generator=g)` after
    /// `g.manual_seed(seed)`. For all epochs of PyTorch's `DataLoader(shuffle=True)` see the loader's
    /// [`generator`](crate::DataLoaderBuilder::generator).
    ///
    /// ```
    /// use overdrive_dataload::{DistributedSampler, RandomSampler, Sampler};
    ///
    /// let order = RandomSampler::new(5, 0).torch_order(true);
    /// let rank_1 = DistributedSampler::new(order, 2, 1)?;
    /// // s = DistributedSampler(range(5), 2, 1, seed=0); list(s)
    /// assert_eq!(rank_1.order(0), [0, 3, 4]);
    /// # Ok::<(), overdrive_dataload::DataError>(())
    /// ```
    pub fn torch_order(mut self, torch_order: bool) -> Self {
        self.torch_order = torch_order;
        self
    }

    /// What PyTorch's sampler draws from a generator in one epoch.
    fn drawn(&self, generator: &mut Generator) -> Vec<usize> {
        if self.replacement {
            return generator.randint(self.of, self.num_samples);
        }
        let mut order = Vec::with_capacity(self.num_samples);
        while self.of > 0 && order.len() + self.of <= self.num_samples {
            order.append(&mut generator.randperm(self.of));
        }
        // PyTorch draws the last permutation even if nothing of it is used.
        let rest = self.num_samples - order.len();
        order.extend(generator.randperm(self.of).into_iter().take(rest));
        order
    }
}

impl Sampler for RandomSampler {
    fn len(&self) -> usize {
        self.num_samples
    }

    fn order(&self, epoch: u64) -> Vec<usize> {
        if self.torch_order {
            return self.drawn(&mut Generator::manual_seed(self.seed.wrapping_add(epoch)));
        }
        let mut bits = Philox::new(self.seed, epoch).bits();
        match self.replacement {
            true => (0..self.num_samples).map(|_| below(bits.draw(), self.of).0).collect(),
            false => permutations(self.of, self.num_samples, || bits.draw()),
        }
    }

    /// Draws only a seed from libtorch's default generator, as PyTorch does, and nothing with
    /// [`torch_order`](RandomSampler::torch_order).
    fn order_from(&self, epoch: u64, generator: &mut Generator) -> Result<Vec<usize>, DataError> {
        Ok(match (self.torch_order, generator.is_default()) {
            (true, _) => self.order(epoch),
            (false, true) => self.drawn(&mut Generator::manual_seed(generator.random())),
            (false, false) => self.drawn(generator),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SequentialSampler;

    #[test]
    fn random_orders_are_permutations_that_differ_by_epoch_and_seed() {
        for len in [0, 1, 2, 3, 100, 1001] {
            let mut order = RandomSampler::new(len, 5).order(9);
            order.sort_unstable();
            assert_eq!(order, SequentialSampler::new(len).order(0));
        }
        let order = |seed, epoch| RandomSampler::new(1000, seed).order(epoch);
        assert_eq!(order(1, 2), order(1, 2));
        assert_ne!(order(1, 2), order(1, 3));
        assert_ne!(order(1, 2), order(2, 2));
    }

    #[test]
    fn the_order_of_a_seed_never_changes() {
        // From a separate implementation in Python; another order would change what every resumed run sees.
        assert_eq!(RandomSampler::new(10, 0).order(0), [1, 6, 3, 9, 0, 2, 5, 4, 7, 8]);
        assert_eq!(RandomSampler::new(10, 1 << 40 | 7).order(3), [4, 1, 0, 7, 8, 9, 2, 3, 5, 6]);
    }

    #[test]
    fn every_position_is_equally_likely() {
        let (len, epochs) = (5, 20_000);
        let mut counts = [[0_u32; 5]; 5];
        for epoch in 0..epochs {
            for (position, index) in RandomSampler::new(len, 11).order(epoch).into_iter().enumerate() {
                counts[position][index] += 1;
            }
        }
        // Five standard deviations of a binomial count with p = 1/5.
        let (mean, slack) = (epochs as f64 / 5.0, 5.0 * (epochs as f64 * 0.2 * 0.8).sqrt());
        assert!(counts.as_flattened().iter().all(|&count| (f64::from(count) - mean).abs() < slack), "{counts:?}");
    }

    #[test]
    fn with_replacement_every_index_is_equally_likely() -> Result<(), DataError> {
        let sampler = RandomSampler::new(10, 3).replacement(true).num_samples(40_000)?;
        let order = sampler.order(1);
        assert_eq!((order.len(), sampler.len()), (40_000, 40_000));
        let mut counts = [0usize; 10];
        order.iter().for_each(|&index| counts[index] += 1);
        // Five standard deviations of a binomial count with p = 1/10.
        assert!(counts.iter().all(|count| count.abs_diff(4000) < 300), "{counts:?}");
        let repeats = order.windows(2).filter(|pair| pair[0] == pair[1]).count();
        assert!(repeats.abs_diff(4000) < 300, "{repeats}");
        assert_ne!(order, sampler.order(2));
        Ok(())
    }

    #[test]
    fn impossible_numbers_of_samples_are_refused() {
        for sampler in [RandomSampler::new(5, 0).num_samples(0), RandomSampler::new(0, 0).num_samples(3)] {
            assert!(matches!(sampler, Err(DataError::InvalidOption { option: "num_samples", .. })));
        }
        assert!(RandomSampler::new(0, 0).replacement(true).order(0).is_empty());
    }
}
