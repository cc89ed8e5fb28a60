//! Decodes the samples of a batch into its memory.

use std::time::Instant;

use overdrive_ffi::HostBuffer;

use super::{ImagePipeline, SCRATCH};
use crate::{BatchSamples, Canvas, DataError, EncodedImage, Stage, Target};

/// The memory layout of a batch's images.
#[derive(Clone, Copy)]
pub(super) struct Order {
    pub(super) channels_last: bool,
    /// Whether the training loop gets this memory, so that pinning it is useful.
    pub(super) pinnable: bool,
}

/// A batch that is being filled, image by image.
pub(super) struct Filled<L> {
    pub(super) buffer: HostBuffer,
    pub(super) labels: Vec<L>,
    /// `[height, width]`, which every image has.
    pub(super) size: [usize; 2],
}

impl ImagePipeline {
    /// Draws all samples, and decodes each into its slot of the batch.
    pub(super) fn fill<L: Target>(
        &self,
        samples: &mut BatchSamples<'_, (EncodedImage, L)>,
        order: Order,
    ) -> Result<Filled<L>, DataError> {
        let mut filled: Option<Filled<L>> = None;
        while let Some(drawn) = samples.next()? {
            let (draw, (image, mut label)) = (drawn.draw(), drawn.sample);
            let begun = Instant::now();
            let (epoch, room, pinned) = (samples.epoch(), samples.len(), samples.pinned() && order.pinnable);
            let (done, decoding) = SCRATCH.with_borrow_mut(|scratch| {
                scratch.take_decoding_time();
                let canvas = self.canvas(&image, &mut label, [draw, epoch], scratch);
                let done = canvas.and_then(|mut canvas| {
                    let filled = match &mut filled {
                        Some(filled) if !filled.labels.is_empty() => filled,
                        filled => {
                            // Decode before allocating a whole batch of images of this size: the header may be wrong.
                            canvas.pixels()?;
                            let image = 3 * canvas.height() * canvas.width();
                            let buffer = self.memory.take(room.saturating_mul(image), pinned)?;
                            filled.insert(Filled::new(buffer, [canvas.height(), canvas.width()], room))
                        }
                    };
                    filled.write(canvas, order.channels_last)
                });
                (done, scratch.take_decoding_time())
            });
            samples.spent(Stage::Decode, decoding);
            samples.spent(Stage::Transform, begun.elapsed().saturating_sub(decoding));
            match (done, &mut filled) {
                (Ok(()), Some(filled)) => filled.labels.push(label),
                (Ok(()), None) => {}
                (Err(error), _) => samples.reject(error)?,
            }
        }
        filled.filter(|filled| !filled.labels.is_empty()).ok_or(DataError::EmptyBatch)
    }
}

impl<L> Filled<L> {
    fn new(buffer: HostBuffer, size: [usize; 2], room: usize) -> Self {
        Self { buffer, labels: Vec::with_capacity(room), size }
    }

    pub(super) fn image_bytes(&self) -> usize {
        3 * self.size[0] * self.size[1]
    }

    /// Writes the image of the next label.
    fn write(&mut self, canvas: Canvas<'_>, channels_last: bool) -> Result<(), DataError> {
        let size = [canvas.height(), canvas.width()];
        if size != self.size {
            let [expected, found] = [self.size, size].map(|[height, width]| vec![3, height, width]);
            let (position, others) = (self.labels.len(), Vec::new());
            return Err(DataError::ShapeMismatch { position, expected, found, others });
        }
        let (bytes, position) = (self.image_bytes(), self.labels.len());
        canvas.write(channels_last, &mut self.buffer.as_mut_slice()[position * bytes..][..bytes])
    }
}
