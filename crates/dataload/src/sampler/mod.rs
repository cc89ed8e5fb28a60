//! The order in which an epoch visits the samples.

mod curriculum;
mod distributed;
mod random;
mod sequential;
mod subset_random;
mod weighted;

pub use curriculum::Curriculum;
pub use distributed::DistributedSampler;
pub use random::RandomSampler;
pub use sequential::SequentialSampler;
pub use subset_random::SubsetRandomSampler;
pub use weighted::WeightedRandomSampler;

/// Gives the order of every epoch.
///
/// An order is a pure function of the epoch's number: it depends neither on earlier epochs nor on the number of
/// workers, so that a run resumed at epoch 7 sees what an unbroken one sees.
///
/// A list of indices is a sampler too: it gives them as they are in every epoch.
///
/// # Source
/// `torch.utils.data.Sampler`.
pub trait Sampler: Send + Sync {
    /// How many indices an epoch has.
    fn len(&self) -> usize;

    /// The dataset indices in the order of `epoch`, [`len`](Sampler::len) of them.
    fn order(&self, epoch: u64) -> Vec<usize>;

    /// The indices that all ranks share out in `epoch`: what [`OnError::Replace`](crate::OnError::Replace) draws its
    /// substitutes from. The [`order`](Sampler::order) itself, unless that is one rank's part.
    fn pool(&self, epoch: u64) -> Vec<usize> {
        self.order(epoch)
    }

    /// How many ranks share the data, each with a sampler of its own like this one. Where it is more than one, the loader
    /// sees to it that no rank makes a step fewer than the others, see [`OnError::Skip`](crate::OnError::Skip).
    fn world_size(&self) -> usize {
        1
    }

    /// Where what is at `place` of this rank's order is in the order of all ranks: what tells the draws of one sample on
    /// two ranks apart, see [`Drawn::draw`](crate::Drawn::draw). The place itself, unless there are several ranks.
    fn global_place(&self, place: usize) -> usize {
        place
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

    fn pool(&self, epoch: u64) -> Vec<usize> {
        (**self).pool(epoch)
    }

    fn world_size(&self) -> usize {
        (**self).world_size()
    }

    fn global_place(&self, place: usize) -> usize {
        (**self).global_place(place)
    }
}

impl Sampler for Vec<usize> {
    fn len(&self) -> usize {
        self.len()
    }

    fn order(&self, _epoch: u64) -> Vec<usize> {
        self.clone()
    }
}
