//! Batches that are packs of sequences.

use std::ops::Range;

use super::best_fit::{best_fit, fits, longest_first};
use crate::permutation::shuffle;
use crate::{BatchPlan, BatchSampler, DataError, Philox};

/// Batches of sequences that together fill a fixed number of tokens, without padding or cutting any sequence.
///
/// Each batch is one pack of [`pack`](crate::pack); [`PackTokens`](crate::PackTokens) makes tensors of it. Every epoch
/// swaps sequences of equal length at random and shuffles the packs: the number of packs stays the same, while the
/// sequences that share one change. For several ranks there is [`DistributedBatches`](crate::DistributedBatches).
///
/// ```
/// use overdrive_dataload::{BatchSampler, TokenPacking};
///
/// let lengths = vec![900, 500, 400, 124, 100, 24];
/// let packing = TokenPacking::builder(lengths, 1024).seed(1).build()?;
/// assert_eq!((packing.len(), packing.fill()), (2, 1.0));
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// # Source
/// Krell et al., "Efficient Sequence Packing without Cross-contamination" (2021); Ding et al., "Fewer Truncations
/// Improve Language Modeling" (2024), the source of the best-fit decreasing used here.
#[derive(Clone, Debug)]
pub struct TokenPacking {
    /// The sequences' indices, the longest first.
    by_length: Vec<usize>,
    /// Ranges of `by_length` with sequences of equal length.
    equal: Vec<Range<usize>>,
    /// The packs, as positions in `by_length`.
    packs: BatchPlan,
    fill: f64,
    seed: u64,
}

impl TokenPacking {
    /// Starts from the length of every sequence of the dataset and the number of tokens that a pack may hold.
    pub fn builder(lengths: impl Into<Vec<usize>>, capacity: usize) -> TokenPackingBuilder {
        let lengths = lengths.into();
        TokenPackingBuilder {
            lengths,
            capacity,
            max_sequences: None,
            truncate: false,
            seed: overdrive_core::base_seed(),
        }
    }

    /// The share of all packs' capacity that tokens fill; 1 when there are no packs.
    pub fn fill(&self) -> f64 {
        self.fill
    }
}

impl BatchSampler for TokenPacking {
    fn len(&self) -> usize {
        self.packs.len()
    }

    fn plan(&self, epoch: u64) -> BatchPlan {
        let mut bits = Philox::new(self.seed, epoch).bits();
        let mut sequences = self.by_length.clone();
        for equal in &self.equal {
            shuffle(&mut sequences[equal.clone()], || bits.draw());
        }
        let mut order: Vec<usize> = (0..self.packs.len()).collect();
        shuffle(&mut order, || bits.draw());
        let mut plan = BatchPlan::with_capacity(sequences.len(), order.len());
        for pack in order {
            plan.order.extend(self.packs.batch(pack).into_iter().flatten().map(|&place| sequences[place]));
            plan.ends.push(plan.order.len());
        }
        plan
    }
}

/// Collects the options of a [`TokenPacking`]; made by [`TokenPacking::builder`].
#[derive(Clone, Debug)]
#[must_use = "call build() to get the batch sampler"]
pub struct TokenPackingBuilder {
    lengths: Vec<usize>,
    capacity: usize,
    max_sequences: Option<usize>,
    truncate: bool,
    seed: u64,
}

impl TokenPackingBuilder {
    /// The most sequences in a pack; no limit unless set.
    pub fn max_sequences(mut self, max_sequences: usize) -> Self {
        self.max_sequences = Some(max_sequences);
        self
    }

    /// Whether a sequence longer than the capacity is counted as the capacity instead of being an error; off unless
    /// set. [`PackTokens::max_length`](crate::PackTokens::max_length) does the truncation; [`Pieces`](crate::Pieces)
    /// split long sequences without losing tokens.
    pub fn truncate(mut self, truncate: bool) -> Self {
        self.truncate = truncate;
        self
    }

    /// The seed of the order; unless set, that of [`seed_everything`](overdrive_core::seed_everything), or 0.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Packs the sequences.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a sequence longer than the capacity unless it is [truncated](Self::truncate),
    /// and for a `capacity` or `max_sequences` of 0.
    pub fn build(mut self) -> Result<TokenPacking, DataError> {
        let most = self.max_sequences.unwrap_or(usize::MAX);
        for (option, value) in [("capacity", self.capacity), ("max_sequences", most)] {
            DataError::at_least_1(option, value)?;
        }
        if self.truncate {
            self.lengths.iter_mut().for_each(|length| *length = self.capacity.min(*length));
        }
        fits(&self.lengths, self.capacity)?;
        let by_length = longest_first(&self.lengths);
        let sorted: Vec<usize> = by_length.iter().map(|&index| self.lengths[index]).collect();
        let packs: BatchPlan = best_fit(&sorted, self.capacity, most).into_iter().collect();
        let tokens: f64 = sorted.iter().map(|&length| length as f64).sum();
        let fill = if packs.is_empty() { 1.0 } else { tokens / (packs.len() as f64 * self.capacity as f64) };
        let mut equal = Vec::new();
        let mut start = 0;
        for group in sorted.chunk_by(|a, b| a == b) {
            equal.push(start..start + group.len());
            start += group.len();
        }
        Ok(TokenPacking { by_length, equal, packs, fill, seed: self.seed })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DistributedBatches, Draws};

    fn lengths(count: usize, longest: usize) -> Vec<usize> {
        let mut draws = Draws::new(1, 1, 1, 1);
        (0..count).map(|_| 1 + (longest as f64 * draws.uniform(0.0, 1.0).powi(3)) as usize).collect()
    }

    #[test]
    fn packs_hold_all_sequences_and_little_else() -> Result<(), DataError> {
        let lengths = lengths(5000, 2000);
        let packing = TokenPacking::builder(lengths.clone(), 2048).seed(3).build()?;
        assert!(packing.fill() > 0.995, "{}", packing.fill());
        for epoch in 0..3 {
            let plan = packing.plan(epoch);
            assert_eq!((plan.len(), &plan), (packing.len(), &packing.plan(epoch)));
            let tokens = |batch: &[usize]| batch.iter().map(|&index| lengths[index]).sum::<usize>();
            assert!(plan.batches().all(|batch| tokens(batch) <= 2048));
            let mut all: Vec<usize> = plan.batches().flatten().copied().collect();
            all.sort_unstable();
            assert!(all.into_iter().eq(0..5000));
        }
        assert_ne!(packing.plan(0), packing.plan(1));
        Ok(())
    }

    #[test]
    fn neighbours_change_from_epoch_to_epoch() -> Result<(), DataError> {
        let packing = TokenPacking::builder(lengths(2000, 100), 256).build()?;
        let with_zero = |epoch| {
            let plan = packing.plan(epoch);
            let mut pack = plan.batches().find(|batch| batch.contains(&0)).unwrap_or_default().to_vec();
            pack.sort_unstable();
            pack
        };
        assert_ne!(with_zero(0), with_zero(1));
        Ok(())
    }

    #[test]
    fn ranks_get_equally_many_whole_packs() -> Result<(), DataError> {
        let packing = TokenPacking::builder(lengths(999, 100), 300).build()?;
        let plan = packing.plan(4);
        for rank in 0..3 {
            let part = DistributedBatches::new(packing.clone(), 3, rank)?;
            assert_eq!(part.len(), packing.len().div_ceil(3));
            assert_eq!(part.plan(4).batch(5), plan.batch(5 * 3 + rank));
        }
        Ok(())
    }

    #[test]
    fn limits_are_kept_or_refused() -> Result<(), DataError> {
        let capped = TokenPacking::builder(lengths(500, 50), 512).max_sequences(4).build()?;
        assert!(capped.plan(0).batches().all(|batch| batch.len() <= 4));
        let long = || TokenPacking::builder([5, 30, 5], 10);
        assert!(matches!(long().build(), Err(DataError::InvalidOption { option: "capacity", .. })));
        assert_eq!((long().truncate(true).build()?.len(), long().truncate(true).build()?.fill()), (2, 1.0));
        assert!(matches!(
            long().max_sequences(0).build(),
            Err(DataError::InvalidOption { option: "max_sequences", .. })
        ));
        assert!(TokenPacking::builder([], 0).build().is_err());
        assert_eq!(TokenPacking::builder([], 1).build()?.fill(), 1.0);
        Ok(())
    }
}
