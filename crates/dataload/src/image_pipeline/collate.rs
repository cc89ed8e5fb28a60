//! Batches of a pipeline: their images, and their labels in several ways.

use tch::{Kind, Tensor};

use super::ImagePipeline;
use super::fill::Order;
use crate::batch_samples::{Listed, Prepared};
use crate::{BatchSamples, Collate, DataError, EncodedImage, Stackable, Target, ToFloat};

impl ImagePipeline {
    /// The images of a batch, and their labels.
    fn batch<L: Target>(
        &self,
        samples: &mut BatchSamples<'_, (EncodedImage, L)>,
    ) -> Result<(Tensor, Vec<L>), DataError> {
        let filled = self.fill(samples, Order { channels_last: self.channels_last, pinnable: true })?;
        let [images, height, width] = [filled.labels.len(), filled.size[0], filled.size[1]].map(|size| size as i64);
        let batch = match self.channels_last {
            true => {
                let pixels = filled.buffer.into_tensor(Kind::Uint8, &[images, height, width, 3])?;
                pixels.f_permute([0, 3, 1, 2])?
            }
            false => filled.buffer.into_tensor(Kind::Uint8, &[images, 3, height, width])?,
        };
        Ok((batch, filled.labels))
    }

    fn prepare_with(&self, image: &EncodedImage, label: &mut dyn Target, at: [u64; 2]) -> Prepared {
        self.prepared(image, label, at, self.channels_last)
    }
}

/// An [`ImagePipeline`] whose batches are float32; made by [`ImagePipeline::to_float`].
///
/// # Shapes
/// `N` samples `(EncodedImage, L)` give float32 `[N, 3, H, W]`, and the labels as [`ImagePipeline`] does.
#[derive(Clone, Debug)]
pub struct FloatPipeline {
    pipeline: ImagePipeline,
    to_float: ToFloat,
}

impl FloatPipeline {
    pub(super) fn new(pipeline: ImagePipeline, to_float: ToFloat) -> Self {
        Self { pipeline, to_float }
    }

    /// See [`ImagePipeline::collate_targets`].
    pub fn collate_targets<L: Target, C: Collate<L>>(self, collate: C) -> CollateTargets<Self, C> {
        CollateTargets::new(self, collate)
    }

    fn batch<L: Target>(
        &self,
        samples: &mut BatchSamples<'_, (EncodedImage, L)>,
    ) -> Result<(Tensor, Vec<L>), DataError> {
        let mut filled = self.pipeline.fill(samples, Order { channels_last: false, pinnable: false })?;
        let bytes = filled.image_bytes() * filled.labels.len();
        let [images, height, width] = [filled.labels.len(), filled.size[0], filled.size[1]];
        let pixels = &filled.buffer.as_mut_slice()[..bytes];
        let batch = self.to_float.planes(pixels, [images, 3, height, width], samples.pinned())?;
        Ok((batch, filled.labels))
    }

    fn prepare_with(&self, image: &EncodedImage, label: &mut dyn Target, at: [u64; 2]) -> Prepared {
        self.pipeline.prepared(image, label, at, false)
    }
}

/// A pipeline with a collate function for its labels; made by [`ImagePipeline::collate_targets`].
///
/// # Shapes
/// The images are those of the pipeline; the second part of a batch is what the collate function makes of the labels.
#[derive(Clone, Debug)]
pub struct CollateTargets<P, C> {
    pipeline: P,
    collate: C,
}

impl<P, C> CollateTargets<P, C> {
    pub(super) fn new(pipeline: P, collate: C) -> Self {
        Self { pipeline, collate }
    }
}

macro_rules! collate {
    // `$it` is the collate function, of which `$pipeline` makes the images and `$stack` puts the labels together.
    ([$($generics:tt)*] $type:ty, $batch:ty, |$it:ident, $labels:ident| $pipeline:expr, $stack:expr) => {
        impl<$($generics)*> Collate<(EncodedImage, L)> for $type {
            type Batch = (Tensor, $batch);

            /// Uses the samples' positions as their draws, and epoch 0.
            fn collate(&self, samples: Vec<(EncodedImage, L)>) -> Result<Self::Batch, DataError> {
                self.collate_from(&mut BatchSamples::new(&mut Listed::from(samples), 0, 0, false))
            }

            fn collate_from(
                &self,
                samples: &mut BatchSamples<'_, (EncodedImage, L)>,
            ) -> Result<Self::Batch, DataError> {
                let $it = self;
                let (images, $labels) = $pipeline.batch(samples)?;
                Ok((images, $stack?))
            }

            fn prepare(&self, (image, label): &mut (EncodedImage, L), draw: u64, epoch: u64) -> Option<Prepared> {
                let $it = self;
                let prepared = $pipeline.prepare_with(image, label, [draw, epoch]);
                // Not needed any more, and the whole batch's would be in memory.
                image.bytes = std::sync::Arc::default();
                Some(prepared)
            }
        }
    };
    ($pipeline:ty) => {
        collate!([L: Target + Stackable] $pipeline, L::Batch, |it, labels| it, L::stack(labels));
        collate!(
            [L: Target, C: Collate<L>] CollateTargets<$pipeline, C>, C::Batch,
            |it, labels| it.pipeline, it.collate.collate(labels)
        );
    };
}

collate!(ImagePipeline);
collate!(FloatPipeline);
