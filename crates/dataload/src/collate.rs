//! Makes a batch from its samples.

use tch::Tensor;

use crate::batch_samples::Prepared;
use crate::stack::common_shape;
use crate::{BatchSamples, DataError, Image};

/// Turns the samples of one batch into what the training loop gets. A closure is a collate function too.
///
/// It runs in the worker threads, one batch per thread. libtorch's operators run there on that thread alone.
///
/// # Source
/// `collate_fn` of `torch.utils.data.DataLoader`.
#[doc(alias = "collate_fn")]
pub trait Collate<S>: Send + Sync {
    /// What the loader yields.
    type Batch: Send;

    /// Combines `samples`, which are in the sampler's order.
    ///
    /// # Errors
    /// For samples that do not form a batch; the loader adds the sample's dataset index to a
    /// [`DataError::ShapeMismatch`] or [`DataError::Misfit`].
    fn collate(&self, samples: Vec<S>) -> Result<Self::Batch, DataError>;

    /// The form that the loader calls: `samples` are still to be read. Implement it to handle each sample as it is
    /// read, know its index, or reject it.
    ///
    /// # Errors
    /// As [`collate`](Collate::collate), and those of [`BatchSamples`].
    fn collate_from(&self, samples: &mut BatchSamples<'_, S>) -> Result<Self::Batch, DataError> {
        self.collate(samples.all()?)
    }

    /// Whether it reads its samples, rather than to take all of a batch by their indices.
    #[doc(hidden)]
    fn reads_samples(&self) -> bool {
        true
    }

    /// What can be made of a sample alone, which is read by another worker than the one that makes its batch. For the
    /// collate functions of this crate: it may change the sample as its batch needs it.
    #[doc(hidden)]
    fn prepare(&self, _sample: &mut S, _draw: u64, _epoch: u64) -> Option<Prepared> {
        None
    }
}

impl<S, B, F> Collate<S> for F
where
    B: Send,
    F: Fn(Vec<S>) -> Result<B, DataError> + Send + Sync,
{
    type Batch = B;

    fn collate(&self, samples: Vec<S>) -> Result<B, DataError> {
        self(samples)
    }
}

/// The pixels of a batch in the order of its tensor: image by image, and channel by channel within an image.
pub(crate) struct Planes {
    pub(crate) bytes: Vec<u8>,
    images: usize,
    /// `[C, H, W]`, which every image has.
    chw: [usize; 3],
}

impl Planes {
    pub(crate) fn stack<'a>(images: impl Iterator<Item = &'a Image> + Clone) -> Result<Self, DataError> {
        let shapes: Vec<_> = images.clone().map(Image::chw).collect();
        let chw = *common_shape(&shapes)?;
        let mut bytes = Vec::with_capacity(shapes.len() * chw.iter().product::<usize>());
        for image in images {
            match image.channels() {
                1 => bytes.extend_from_slice(image.data()),
                channels => (0..channels).for_each(|channel| {
                    bytes.extend(image.data().chunks_exact(channels).map(|pixel| pixel[channel]));
                }),
            }
        }
        Ok(Self { bytes, images: shapes.len(), chw })
    }

    /// `[N, C, H, W]`.
    pub(crate) fn shape(&self) -> [usize; 4] {
        let [channels, height, width] = self.chw;
        [self.images, channels, height, width]
    }
}

/// The labels as int64 `[N]`.
pub(crate) fn targets(samples: &[(Image, i64)]) -> Result<Tensor, DataError> {
    let labels: Vec<i64> = samples.iter().map(|(_, label)| *label).collect();
    Ok(Tensor::f_from_slice(&labels)?)
}
