//! One rank's part of every epoch's batches.

use crate::rank::Rank;
use crate::{BatchPlan, BatchSampler, DataError};

/// One rank's share of another batch sampler's batches: whole batches, or a part of each.
///
/// All ranks get equally many batches, so that no rank waits in a collective for a batch that another rank does not
/// have. The inner sampler needs the same seed and options on every rank.
///
/// Whole batches are dealt out in turn: each rank takes every `world_size`-th one. Packs of tokens need this, since
/// they must stay whole.
///
/// With [`split_batches`](Self::split_batches) each batch is cut into one part per rank instead. Then batches of
/// samples of similar length keep all ranks equally busy, and a global batch has the same samples for any number of
/// ranks.
///
/// # Source
/// `BatchSamplerShard` of Hugging Face Accelerate; remainders follow PyTorch's `DistributedSampler`.
#[derive(Clone, Debug)]
#[doc(alias = "BatchSamplerShard")]
pub struct DistributedBatches<B> {
    batches: B,
    rank: Rank,
    split: bool,
}

impl<B: BatchSampler> DistributedBatches<B> {
    /// The share of `rank` (counted from 0) of `world_size` ranks in `batches`.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a `world_size` of 0 or a `rank` that is not below it.
    pub fn new(batches: B, world_size: usize, rank: usize) -> Result<Self, DataError> {
        Ok(Self { batches, rank: Rank::new(world_size, rank)?, split: false })
    }

    /// Whether a remainder is dropped rather than filled up from the start; off unless set.
    ///
    /// The remainder is the batches, or with [`split_batches`](Self::split_batches) the samples of each batch, that do
    /// not divide by the number of ranks. A batch of fewer samples than ranks is always filled up, so that no rank gets
    /// an empty one.
    pub fn drop_last(mut self, drop_last: bool) -> Self {
        self.rank.drop_last = drop_last;
        self
    }

    /// Whether every batch is cut into parts, rather than given to one rank; off unless set.
    pub fn split_batches(mut self, split_batches: bool) -> Self {
        self.split = split_batches;
        self
    }
}

impl<B: BatchSampler> BatchSampler for DistributedBatches<B> {
    fn len(&self) -> usize {
        if self.split { self.batches.len() } else { self.rank.share(self.batches.len()) }
    }

    fn plan(&self, epoch: u64) -> BatchPlan {
        let (plan, mut own) = (self.batches.plan(epoch), BatchPlan::default());
        if !self.split {
            for (number, round) in self.rank.positions(plan.len()) {
                own.push(plan.draws(number).map(|draw| (draw, round)));
            }
            return own;
        }
        for number in 0..plan.len() {
            let batch: Vec<(usize, u64)> = plan.draws(number).collect();
            let positions = self.rank.or_fill(batch.len()).positions(batch.len());
            own.push(positions.map(|(position, round)| (batch[position], round)));
        }
        own
    }

    fn world_size(&self) -> usize {
        self.rank.world_size.saturating_mul(self.batches.world_size())
    }

    fn pool(&self, epoch: u64) -> Vec<usize> {
        self.batches.pool(epoch)
    }

    /// A saved position counts this rank's batches, so with whole batches it fits only the same number of ranks: where
    /// batches vary in size (0 inside), the number of ranks stands for the size.
    fn global_batch_size(&self) -> usize {
        match (self.split, self.batches.global_batch_size()) {
            (true, size) => size,
            (false, size) => size.max(1).saturating_mul(self.rank.world_size),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FixedBatches, SequentialSampler, TokenPacking};

    fn rank(samples: usize, world_size: usize, rank: usize) -> DistributedBatches<FixedBatches<SequentialSampler>> {
        let batches = FixedBatches::new(SequentialSampler::new(samples), 4, false).unwrap();
        DistributedBatches::new(batches, world_size, rank).unwrap()
    }

    fn batches(sampler: &impl BatchSampler) -> Vec<Vec<usize>> {
        let plan = sampler.plan(0);
        assert_eq!(plan.len(), sampler.len());
        plan.batches().map(Into::into).collect()
    }

    #[test]
    fn whole_batches_are_dealt_out() {
        assert_eq!(batches(&rank(11, 2, 0)), [vec![0, 1, 2, 3], vec![8, 9, 10]]);
        assert_eq!(batches(&rank(11, 2, 1)), [[4, 5, 6, 7], [0, 1, 2, 3]]);
        assert_eq!(batches(&rank(11, 2, 1).drop_last(true)), [[4, 5, 6, 7]]);
    }

    #[test]
    fn batches_are_cut_alike() {
        assert_eq!(batches(&rank(11, 2, 0).split_batches(true)), [[0, 2], [4, 6], [8, 10]]);
        assert_eq!(batches(&rank(11, 2, 1).split_batches(true)), [[1, 3], [5, 7], [9, 8]]);
        assert_eq!(batches(&rank(11, 2, 1).split_batches(true).drop_last(true)), [vec![1, 3], vec![5, 7], vec![9]]);
        assert_eq!(batches(&rank(5, 2, 1).split_batches(true).drop_last(true)), [vec![1, 3], vec![4]]);
    }

    #[test]
    fn the_global_batch_size_tells_layouts_apart() -> Result<(), DataError> {
        let packs = |world_size| {
            let packing = TokenPacking::builder([3, 2, 2], 4).build()?;
            Ok::<_, DataError>(DistributedBatches::new(packing, world_size, 0)?.global_batch_size())
        };
        assert_ne!(packs(2)?, packs(4)?);
        assert_eq!(rank(11, 2, 0).global_batch_size(), 8);
        assert_eq!(rank(11, 2, 0).split_batches(true).global_batch_size(), 4);
        Ok(())
    }

    #[test]
    fn ranks_that_do_not_exist_are_refused() {
        let batches = FixedBatches::new(SequentialSampler::new(3), 1, false).unwrap();
        assert!(DistributedBatches::new(batches, 2, 2).is_err());
    }
}
