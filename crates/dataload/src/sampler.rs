//! The order in which an epoch visits the samples.

use crate::rng::Philox;

/// Gives the order of every epoch.
///
/// An order is a pure function of the epoch's number: it depends neither on earlier epochs nor on the number of
/// workers, so that a run resumed at epoch 7 sees what an unbroken one sees.
///
/// # Source
/// `torch.utils.data.Sampler`.
pub trait Sampler: Send + Sync {
    /// How many indices an epoch has.
    fn len(&self) -> usize;

    /// The dataset indices in the order of `epoch`, [`len`](Sampler::len) of them.
    fn order(&self, epoch: u64) -> Vec<usize>;

    /// How many ranks share the data, each with a sampler of its own like this one.
    fn world_size(&self) -> usize {
        1
    }

    /// Whether an epoch has no index at all.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<S: Sampler + ?Sized> Sampler for Box<S> {
    fn len(&self) -> usize {
        (**self).len()
    }

    fn order(&self, epoch: u64) -> Vec<usize> {
        (**self).order(epoch)
    }

    fn world_size(&self) -> usize {
        (**self).world_size()
    }
}

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

/// Every sample once, in an order that is new in each epoch.
///
/// The permutation is a Fisher-Yates shuffle from the last index down: step `k` (from 0) swaps index `i = len - 1 - k`
/// with `floor(bits * (i + 1) / 2^64)`, where `bits` is [`Philox`] of (seed, epoch) at position `k`. The
/// bias of the scaling is below `len / 2^64`.
///
/// # Source
/// `torch.utils.data.RandomSampler` without replacement; the order itself differs from PyTorch's.
#[derive(Clone, Copy, Debug)]
pub struct RandomSampler {
    len: usize,
    seed: u64,
}

impl RandomSampler {
    /// Permutations of the indices 0 to `len - 1`.
    pub fn new(len: usize, seed: u64) -> Self {
        Self { len, seed }
    }
}

impl Sampler for RandomSampler {
    fn len(&self) -> usize {
        self.len
    }

    fn order(&self, epoch: u64) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.len).collect();
        for (last, bits) in (1..self.len).rev().zip(Philox::new(self.seed, epoch).iter()) {
            let other = (u128::from(bits) * (last as u128 + 1)) >> 64;
            order.swap(last, other as usize);
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn the_order_of_a_seed_is_fixed_for_ever() {
        // From a separate implementation in Python; another order would change what every resumed run sees.
        assert_eq!(RandomSampler::new(10, 0).order(0), [6, 7, 3, 4, 9, 1, 0, 2, 5, 8]);
        assert_eq!(RandomSampler::new(10, 1 << 40 | 7).order(3), [1, 0, 4, 9, 2, 7, 5, 8, 3, 6]);
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
}
