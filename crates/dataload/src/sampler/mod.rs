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

use crate::{DataError, Generator};

/// Decides the order of every epoch.
///
/// An order is a pure function of the epoch's number: it depends neither on earlier epochs nor on the number of
/// workers, so a run resumed at epoch 7 sees the same order as an uninterrupted one.
///
/// A `Vec` of indices is a sampler too: it gives them unchanged in every epoch.
///
/// # Source
/// `torch.utils.data.Sampler`.
pub trait Sampler: Send + Sync {
    /// How many indices an epoch has.
    fn len(&self) -> usize;

    /// The dataset indices in the order of `epoch`, [`len`](Sampler::len) of them.
    fn order(&self, epoch: u64) -> Vec<usize>;

    /// The indices that PyTorch's sampler would draw from `generator` at this moment, for
    /// [`DataLoaderBuilder::generator`](crate::DataLoaderBuilder::generator). By default the
    /// [`order`](Sampler::order), drawing nothing.
    ///
    /// # Errors
    /// When libtorch fails.
    fn order_from(&self, epoch: u64, _generator: &mut Generator) -> Result<Vec<usize>, DataError> {
        Ok(self.order(epoch))
    }

    /// The indices that all ranks together go through in `epoch`: [`OnError::Replace`](crate::OnError::Replace) draws
    /// substitutes from them. By default the [`order`](Sampler::order), which is wrong for a sampler whose order is one
    /// rank's share.
    fn pool(&self, epoch: u64) -> Vec<usize> {
        self.order(epoch)
    }

    /// How many ranks share the data, each with its own sampler like this one. If it is more than one, the loader makes
    /// sure that all ranks make the same number of steps, see [`OnError::Skip`](crate::OnError::Skip).
    fn world_size(&self) -> usize {
        1
    }

    /// Converts a position in this rank's order to the position in the order of all ranks, which tells apart the draws
    /// of one sample on two ranks, see [`Drawn::draw`](crate::Drawn::draw). By default the same position, which is
    /// right for a single rank.
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

    fn order_from(&self, epoch: u64, generator: &mut Generator) -> Result<Vec<usize>, DataError> {
        (**self).order_from(epoch, generator)
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
