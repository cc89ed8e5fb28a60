//! One rank's share of an order.

use crate::rank::Rank;
use crate::{DataError, RandomSampler, Sampler};

/// Every `world_size`-th index of another sampler's order, beginning at position `rank`.
///
/// All ranks get equally many indices: the order is filled up from its start (repeatedly, if necessary), or with
/// [`drop_last`](Self::drop_last) the remainder is dropped.
///
/// The inner sampler needs the same seed on every rank. Then batch `b` of all ranks together has the same samples for
/// any number of ranks, as long as the global batch size is the same: a run can resume with another number of ranks.
/// PyTorch's `set_epoch` is not needed, since the loader passes the epoch.
///
/// ```
/// use overdrive_dataload::{DistributedSampler, RandomSampler, Sampler, SequentialSampler};
///
/// let rank_1 = DistributedSampler::new(SequentialSampler::new(10), 4, 1)?;
/// assert_eq!(rank_1.order(0), [1, 5, 9]);
/// let rank_3 = DistributedSampler::new(SequentialSampler::new(10), 4, 3)?;
/// assert_eq!(rank_3.order(0), [3, 7, 1]);
/// assert_eq!(rank_3.drop_last(true).order(0), [3, 7]);
/// let shuffled = DistributedSampler::new(RandomSampler::new(10, 42), 4, 3)?;
/// assert_eq!(shuffled.len(), 3);
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// # Source
/// `torch.utils.data.distributed.DistributedSampler`, which has its own random or sequential order inside.
#[derive(Clone, Debug)]
#[doc(alias = "set_epoch")]
pub struct DistributedSampler<S> {
    sampler: S,
    rank: Rank,
}

impl<S: Sampler> DistributedSampler<S> {
    /// The share of `rank` (counted from 0) of `world_size` ranks in `sampler`'s order.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a `world_size` of 0 or a `rank` that is not below it.
    #[doc(alias = "num_replicas")]
    pub fn new(sampler: S, world_size: usize, rank: usize) -> Result<Self, DataError> {
        Ok(Self { sampler, rank: Rank::new(world_size, rank)? })
    }

    /// Whether a remainder is dropped rather than filled up from the start; off unless set.
    pub fn drop_last(mut self, drop_last: bool) -> Self {
        self.rank.drop_last = drop_last;
        self
    }
}

impl DistributedSampler<RandomSampler> {
    /// PyTorch's default: a random order of `len` samples, the same on every rank, divided between the ranks.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn shuffled(len: usize, world_size: usize, rank: usize, seed: u64) -> Result<Self, DataError> {
        Self::new(RandomSampler::new(len, seed), world_size, rank)
    }
}

impl<S: Sampler> Sampler for DistributedSampler<S> {
    fn len(&self) -> usize {
        self.rank.share(self.sampler.len())
    }

    fn order(&self, epoch: u64) -> Vec<usize> {
        let order = self.sampler.order(epoch);
        self.rank.positions(order.len()).map(|(position, _)| order[position]).collect()
    }

    fn pool(&self, epoch: u64) -> Vec<usize> {
        self.sampler.pool(epoch)
    }

    fn world_size(&self) -> usize {
        self.rank.world_size.saturating_mul(self.sampler.world_size())
    }

    fn global_place(&self, place: usize) -> usize {
        self.sampler.global_place(self.rank.place(place))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BatchSampler, FixedBatches, SequentialSampler};

    #[test]
    fn more_ranks_than_samples_repeat_them() -> Result<(), DataError> {
        let rank = |rank| DistributedSampler::new(SequentialSampler::new(3), 8, rank);
        let first: Vec<usize> = (0..8).map(|r| Ok(rank(r)?.order(0)[0])).collect::<Result<_, DataError>>()?;
        assert_eq!(first, [0, 1, 2, 0, 1, 2, 0, 1]);
        assert!(rank(7)?.drop_last(true).order(0).is_empty());
        let none = DistributedSampler::new(SequentialSampler::new(0), 2, 1)?;
        assert_eq!((none.len(), none.order(0)), (0, vec![]));
        Ok(())
    }

    /// Batch `b` of every rank together, sorted.
    fn global_batches(len: usize, world_size: usize, global: usize, epoch: u64) -> Vec<Vec<usize>> {
        let plans: Vec<_> = (0..world_size)
            .map(|rank| {
                let sampler = DistributedSampler::shuffled(len, world_size, rank, 9).unwrap();
                let batches = FixedBatches::new(sampler, global / world_size, false).unwrap();
                assert_eq!(batches.global_batch_size(), global);
                batches.plan(epoch)
            })
            .collect();
        let together = |number| {
            let mut batch = plans.iter().map(|plan| plan.batch(number).unwrap()).collect::<Vec<_>>().concat();
            batch.sort_unstable();
            batch
        };
        (0..plans[0].len()).map(together).collect()
    }

    #[test]
    fn a_global_batch_is_the_same_for_any_number_of_ranks() {
        for len in [96, 101] {
            let alone = global_batches(len, 1, 24, 3);
            for world_size in [2, 3, 4, 6, 8, 12, 24] {
                let batches = global_batches(len, world_size, 24, 3);
                assert_eq!(batches.len(), alone.len());
                assert_eq!(batches[..len / 24], alone[..len / 24], "{world_size} ranks");
            }
            assert_ne!(alone, global_batches(len, 1, 24, 4));
        }
    }

    #[test]
    fn ranks_that_do_not_exist_are_refused() {
        let new = |world_size, rank| DistributedSampler::new(SequentialSampler::new(3), world_size, rank);
        assert!(matches!(new(0, 0), Err(DataError::InvalidOption { option: "world_size", .. })));
        let error = new(4, 4).unwrap_err();
        assert_eq!(error.to_string(), "rank: expected a number below world_size, 4, found 4");
    }
}
