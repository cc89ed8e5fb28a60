//! From the samples of a batch to the batch.

use tch::{Kind, Tensor};

use crate::tensor::tensor_from_bytes;
use crate::{BatchSamples, DataError, Image};

/// Turns the samples of one batch into what the training loop gets. Closures are collate functions too.
///
/// It runs in the worker threads, one batch a thread. Plain Rust serves best there: a libtorch operation that uses
/// several threads would start a pool of its own in every worker.
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
    /// Whatever keeps the samples from forming a batch; a [`DataError::ShapeMismatch`] gets the sample's dataset index
    /// from the loader.
    fn collate(&self, samples: Vec<S>) -> Result<Self::Batch, DataError>;

    /// The same for samples that are still to be read: what the loader calls. One's own form can deal with each sample as
    /// it comes, know its index, and reject it.
    ///
    /// # Errors
    /// As [`collate`](Collate::collate), and those of [`BatchSamples`], which are passed on.
    fn collate_from(&self, samples: &mut BatchSamples<'_, S>) -> Result<Self::Batch, DataError> {
        self.collate(samples.all()?)
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

/// Stacks images and labels as they are: the loader's default.
///
/// # Shapes
/// `N` samples `(Image, i64)` give uint8 `[N, C, H, W]` and int64 `[N]`.
///
/// # Source
/// `torch.utils.data.default_collate`.
#[derive(Clone, Copy, Debug, Default)]
#[doc(alias = "default_collate")]
pub struct Stack;

impl Collate<(Image, i64)> for Stack {
    type Batch = (Tensor, Tensor);

    fn collate(&self, samples: Vec<(Image, i64)>) -> Result<Self::Batch, DataError> {
        let planes = Planes::stack(&samples)?;
        let shape = planes.shape().map(|size| size as i64);
        Ok((tensor_from_bytes(&planes.bytes, Kind::Uint8, &shape)?, targets(&samples)?))
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
    pub(crate) fn stack(samples: &[(Image, i64)]) -> Result<Self, DataError> {
        let chw = common_shape(samples)?;
        let mut bytes = Vec::with_capacity(samples.len() * chw.iter().product::<usize>());
        for (image, _) in samples {
            match image.channels() {
                1 => bytes.extend_from_slice(image.data()),
                channels => (0..channels).for_each(|channel| {
                    bytes.extend(image.data().chunks_exact(channels).map(|pixel| pixel[channel]));
                }),
            }
        }
        Ok(Self { bytes, images: samples.len(), chw })
    }

    /// `[N, C, H, W]`.
    pub(crate) fn shape(&self) -> [usize; 4] {
        let [channels, height, width] = self.chw;
        [self.images, channels, height, width]
    }
}

/// The shape `[C, H, W]` that every image of the batch has.
fn common_shape(samples: &[(Image, i64)]) -> Result<[usize; 3], DataError> {
    let (first, _) = samples.first().ok_or(DataError::EmptyBatch)?;
    if samples.iter().all(|(image, _)| image.chw() == first.chw()) {
        return Ok(first.chw());
    }
    // The sample to blame is one that differs from most others, and the first one may be that.
    let count = |shape| samples.iter().filter(|(image, _)| image.chw() == shape).count();
    let usual = samples.iter().map(|(image, _)| image.chw()).rev().max_by_key(|&shape| count(shape));
    let expected = usual.unwrap_or(first.chw());
    let odd = samples.iter().enumerate().find(|(_, (image, _))| image.chw() != expected);
    let (position, (image, _)) = odd.ok_or(DataError::EmptyBatch)?;
    Err(DataError::ShapeMismatch { position, expected: expected.into(), found: image.chw().into() })
}

/// The labels as int64 `[N]`.
pub(crate) fn targets(samples: &[(Image, i64)]) -> Result<Tensor, DataError> {
    let labels: Vec<i64> = samples.iter().map(|(_, label)| *label).collect();
    Ok(Tensor::f_from_slice(&labels)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interleaved_pixels_become_planes() -> Result<(), DataError> {
        let one = Image::new([1, 2, 3, 4, 5, 6], 1, 2, 3)?;
        let two = Image::new([10, 20, 30, 40, 50, 60], 1, 2, 3)?;
        let (images, labels) = Stack.collate(vec![(one, 7), (two, -1)])?;
        assert_eq!((images.size(), images.kind()), (vec![2, 3, 1, 2], Kind::Uint8));
        let bytes = Vec::<u8>::try_from(images.view(-1)).map_err(DataError::Tensor)?;
        assert_eq!(bytes, [1, 4, 2, 5, 3, 6, 10, 40, 20, 50, 30, 60]);
        assert_eq!(Vec::<i64>::try_from(labels).map_err(DataError::Tensor)?, [7, -1]);
        Ok(())
    }

    #[test]
    fn what_does_not_stack_is_named() -> Result<(), DataError> {
        let (grey, colour) = (Image::new([0; 6], 2, 3, 1)?, Image::new([0; 18], 2, 3, 3)?);
        let error = Stack.collate(vec![(grey.clone(), 0), (grey, 0), (colour, 0)]).unwrap_err();
        let message = "shape mismatch at position 2 of the batch: expected [1, 2, 3], found [3, 2, 3]";
        assert_eq!(error.to_string(), message);
        let (tall, wide) = (Image::new([0; 2], 2, 1, 1)?, Image::new([0; 2], 1, 2, 1)?);
        let error = Stack.collate(vec![(tall, 0), (wide.clone(), 0), (wide, 0)]).unwrap_err().to_string();
        assert_eq!(error, "shape mismatch at position 0 of the batch: expected [1, 1, 2], found [1, 2, 1]");
        assert!(matches!(Stack.collate(vec![]), Err(DataError::EmptyBatch)));
        let none = Image::new([], 0, 0, 1)?;
        assert_eq!(Stack.collate(vec![(none, 0)])?.0.size(), [1, 1, 0, 0]);
        Ok(())
    }
}
