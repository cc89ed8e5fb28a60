//! Cuts an epoch's order into batches.

mod best_fit;
mod distributed;
mod fixed;
mod length_bucketed;
mod token_packing;

pub use best_fit::pack;
pub use distributed::DistributedBatches;
pub use fixed::FixedBatches;
pub use length_bucketed::{LengthBucketed, LengthBucketedBuilder};
pub use token_packing::{TokenPacking, TokenPackingBuilder};

use crate::{DataError, Generator};

/// Decides the batches of every epoch, as lists of dataset indices.
///
/// # Source
/// `torch.utils.data.Sampler[list[int]]`, the `batch_sampler` of `DataLoader`.
pub trait BatchSampler: Send + Sync {
    /// How many batches an epoch has.
    fn len(&self) -> usize;

    /// The batches of `epoch`, [`len`](BatchSampler::len) of them.
    fn plan(&self, epoch: u64) -> BatchPlan;

    /// The indices that all ranks together go through in `epoch`: [`OnError::Replace`](crate::OnError::Replace) draws
    /// substitutes from them. By default those of the [`plan`](BatchSampler::plan), which is wrong for a sampler whose
    /// plan is one rank's share.
    fn pool(&self, epoch: u64) -> Vec<usize> {
        self.plan(epoch).order
    }

    /// The batches that PyTorch would draw from `generator` at this moment, for
    /// [`DataLoaderBuilder::generator`](crate::DataLoaderBuilder::generator). By default those of the
    /// [`plan`](BatchSampler::plan), drawing nothing.
    ///
    /// # Errors
    /// When libtorch fails.
    fn plan_from(&self, epoch: u64, _generator: &mut Generator) -> Result<BatchPlan, DataError> {
        Ok(self.plan(epoch))
    }

    /// How many samples all ranks together take in one step; 0, the default, where that varies. A saved state fits only
    /// a loader with the same value.
    fn global_batch_size(&self) -> usize {
        0
    }

    /// How many ranks share the data, each with its own batch sampler like this one; see
    /// [`Sampler::world_size`](crate::Sampler::world_size).
    fn world_size(&self) -> usize {
        1
    }

    /// Whether an epoch has no batch at all.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The batches of one epoch: an order, and where each batch ends in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BatchPlan {
    order: Vec<usize>,
    ends: Vec<usize>,
    /// For each entry of `order`, its position in the order of all ranks; empty where the two orders are the same.
    places: Vec<u64>,
}

/// Repeats that fill up a remainder get the position `place + (round << ROUND)`, which no first draw has.
const ROUND: u32 = 48;

impl BatchPlan {
    fn with_capacity(indices: usize, batches: usize) -> Self {
        let (order, ends) = (Vec::with_capacity(indices), Vec::with_capacity(batches));
        Self { order, ends, places: Vec::new() }
    }

    /// How many batches there are.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no batch at all.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The dataset indices of batch `number`, or `None` past the last one.
    pub fn batch(&self, number: usize) -> Option<&[usize]> {
        self.order.get(self.start(number)..*self.ends.get(number)?)
    }

    fn start(&self, number: usize) -> usize {
        number.checked_sub(1).and_then(|before| self.ends.get(before)).map_or(0, |end| *end)
    }

    /// The indices of a batch, each with its position in the order of all ranks. No two draws share a position.
    pub(crate) fn draws(&self, number: usize) -> impl Iterator<Item = (usize, u64)> {
        let places = self.start(number)..;
        let place = |place: usize| self.places.get(place).copied().unwrap_or(place as u64);
        self.batch(number).unwrap_or_default().iter().zip(places).map(move |(&index, at)| (index, place(at)))
    }

    /// Adds a batch of `draws`, which are ((index, position), round of repetition).
    fn push(&mut self, draws: impl Iterator<Item = ((usize, u64), u64)>) {
        for ((index, place), round) in draws {
            self.order.push(index);
            self.places.push(place.wrapping_add(round << ROUND));
        }
        self.ends.push(self.order.len());
    }

    /// The batches in order.
    pub fn batches(&self) -> impl Iterator<Item = &[usize]> {
        (0..self.len()).filter_map(|number| self.batch(number))
    }
}

impl<B: AsRef<[usize]>> FromIterator<B> for BatchPlan {
    /// A plan from lists of indices, which may differ in length.
    fn from_iter<I: IntoIterator<Item = B>>(batches: I) -> Self {
        let mut plan = Self::default();
        for batch in batches {
            plan.order.extend_from_slice(batch.as_ref());
            plan.ends.push(plan.order.len());
        }
        plan
    }
}

impl<B: BatchSampler + ?Sized> BatchSampler for Box<B> {
    fn len(&self) -> usize {
        (**self).len()
    }

    fn plan(&self, epoch: u64) -> BatchPlan {
        (**self).plan(epoch)
    }

    fn plan_from(&self, epoch: u64, generator: &mut Generator) -> Result<BatchPlan, DataError> {
        (**self).plan_from(epoch, generator)
    }

    fn pool(&self, epoch: u64) -> Vec<usize> {
        (**self).pool(epoch)
    }

    fn global_batch_size(&self) -> usize {
        (**self).global_batch_size()
    }

    fn world_size(&self) -> usize {
        (**self).world_size()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_of_uneven_batches() {
        let plan: BatchPlan = [vec![5, 6], vec![], vec![7]].into_iter().collect();
        assert_eq!((plan.batch(0), plan.batch(1), plan.batch(2)), (Some(&[5, 6][..]), Some(&[][..]), Some(&[7][..])));
        assert!(plan.batches().eq([&[5, 6][..], &[], &[7]]));
    }
}
