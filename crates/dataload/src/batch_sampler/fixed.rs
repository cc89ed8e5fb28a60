//! Batches of one size.

use crate::{BatchPlan, BatchSampler, DataError, Generator, Sampler};

/// Batches of one size from a [`Sampler`]; the last one may be smaller.
///
/// # Source
/// `torch.utils.data.BatchSampler`.
#[doc(alias = "BatchSampler")]
pub struct FixedBatches<S> {
    sampler: S,
    batch_size: usize,
    drop_last: bool,
}

impl<S: Sampler> FixedBatches<S> {
    /// Cuts `sampler`'s order every `batch_size` indices; `drop_last` drops an incomplete last batch.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] when `batch_size` is 0.
    pub fn new(sampler: S, batch_size: usize, drop_last: bool) -> Result<Self, DataError> {
        DataError::at_least_1("batch_size", batch_size)?;
        Ok(Self { sampler, batch_size, drop_last })
    }

    fn batches(&self, samples: usize) -> usize {
        if self.drop_last { samples / self.batch_size } else { samples.div_ceil(self.batch_size) }
    }

    fn cut(&self, order: Vec<usize>) -> BatchPlan {
        let end = |number: usize| number.saturating_mul(self.batch_size).min(order.len());
        let ends = (1..=self.batches(order.len())).map(end).collect();
        let of_all = if self.sampler.world_size() > 1 { order.len() } else { 0 };
        let places = (0..of_all).map(|place| self.sampler.global_place(place) as u64).collect();
        BatchPlan { order, ends, places }
    }
}

impl<S: Sampler> BatchSampler for FixedBatches<S> {
    fn len(&self) -> usize {
        self.batches(self.sampler.len())
    }

    fn global_batch_size(&self) -> usize {
        self.batch_size.saturating_mul(self.sampler.world_size())
    }

    fn world_size(&self) -> usize {
        self.sampler.world_size()
    }

    fn pool(&self, epoch: u64) -> Vec<usize> {
        self.sampler.pool(epoch)
    }

    fn plan(&self, epoch: u64) -> BatchPlan {
        self.cut(self.sampler.order(epoch))
    }

    fn plan_from(&self, epoch: u64, generator: &mut Generator) -> Result<BatchPlan, DataError> {
        Ok(self.cut(self.sampler.order_from(epoch, generator)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SequentialSampler;

    fn sizes(samples: usize, batch_size: usize, drop_last: bool) -> Vec<usize> {
        let batches = FixedBatches::new(SequentialSampler::new(samples), batch_size, drop_last).unwrap();
        let plan = batches.plan(0);
        assert_eq!((plan.len(), plan.batch(plan.len())), (batches.len(), None));
        (0..plan.len()).map(|number| plan.batch(number).unwrap().len()).collect()
    }

    #[test]
    fn the_last_batch_is_smaller_or_dropped() {
        assert_eq!(sizes(10, 4, false), [4, 4, 2]);
        assert_eq!(sizes(10, 4, true), [4, 4]);
        assert_eq!(sizes(8, 4, true), [4, 4]);
        assert!(sizes(3, 4, true).is_empty());
        assert_eq!(sizes(3, usize::MAX, false), [3]);
        assert!(sizes(0, 4, false).is_empty());
        assert!(matches!(
            FixedBatches::new(SequentialSampler::new(3), 0, false),
            Err(DataError::InvalidOption { option: "batch_size", .. })
        ));
    }
}
