//! Decodes the samples of a batch into its memory.

use std::time::{Duration, Instant};

use overdrive_ffi::HostBuffer;

use super::{ImagePipeline, SCRATCH};
use crate::batch_samples::Prepared;
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
            let (epoch, room, pinned) = (samples.epoch(), samples.len(), samples.pinned() && order.pinnable);
            let (done, times) = match samples.prepared::<Decoded>() {
                Some(Decoded { pixels, times }) => {
                    let write = |(bytes, size): (Vec<u8>, _)| {
                        let filled = self.filled(&mut filled, size, room, pinned)?;
                        filled.write(size, |slot| {
                            slot.copy_from_slice(&bytes);
                            Ok(())
                        })
                    };
                    (pixels.and_then(write), times)
                }
                None => self.timed(&image, &mut label, [draw, epoch], |mut canvas, size| {
                    if filled.as_ref().is_none_or(Filled::is_empty) {
                        // Decode before allocating a whole batch of images of this size: the header may be wrong.
                        canvas.pixels()?;
                    }
                    let filled = self.filled(&mut filled, size, room, pinned)?;
                    filled.write(size, |slot| canvas.write(order.channels_last, slot))
                }),
            };
            samples.spent(Stage::Decode, times[0]);
            samples.spent(Stage::Transform, times[1]);
            match (done, &mut filled) {
                (Ok(()), Some(filled)) => filled.labels.push(label),
                (Ok(()), None) => {}
                (Err(error), _) => samples.reject(error)?,
            }
        }
        filled.filter(|filled| !filled.is_empty()).ok_or(DataError::EmptyBatch)
    }

    /// The batch that is being filled; the first good image begins it.
    fn filled<'a, L>(
        &self,
        filled: &'a mut Option<Filled<L>>,
        size: [usize; 2],
        room: usize,
        pinned: bool,
    ) -> Result<&'a mut Filled<L>, DataError> {
        if filled.as_ref().is_none_or(Filled::is_empty) {
            let buffer = self.memory.take(room.saturating_mul(3 * size[0] * size[1]), pinned)?;
            *filled = Some(Filled { buffer, labels: Vec::with_capacity(room), size });
        }
        filled.as_mut().ok_or(DataError::EmptyBatch)
    }

    /// Decodes and transforms an image with its label, and passes it on with its `[height, width]`; returns the times of
    /// decoding and of transforms.
    fn timed<T>(
        &self,
        image: &EncodedImage,
        label: &mut dyn Target,
        at: [u64; 2],
        take: impl FnOnce(Canvas<'_>, [usize; 2]) -> Result<T, DataError>,
    ) -> (Result<T, DataError>, [Duration; 2]) {
        let begun = Instant::now();
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.take_decoding_time();
            let done = self.canvas(image, label, at, scratch).and_then(|canvas| {
                let size = [canvas.height(), canvas.width()];
                take(canvas, size)
            });
            let decoding = scratch.take_decoding_time();
            (done, [decoding, begun.elapsed().saturating_sub(decoding)])
        })
    }

    /// An image for a batch that another worker makes; its label changes with it.
    pub(super) fn prepared(
        &self,
        image: &EncodedImage,
        label: &mut dyn Target,
        at: [u64; 2],
        channels_last: bool,
    ) -> Prepared {
        let (pixels, times) = self.timed(image, label, at, |mut canvas, size| {
            canvas.pixels()?;
            let mut bytes = vec![0; 3 * size[0] * size[1]];
            canvas.write(channels_last, &mut bytes)?;
            Ok((bytes, size))
        });
        Prepared(Box::new(Decoded { pixels, times }))
    }
}

/// An image that was decoded for a batch of another worker.
struct Decoded {
    /// Its bytes, and `[height, width]`.
    pixels: Result<(Vec<u8>, [usize; 2]), DataError>,
    /// The times of decoding and of transforms.
    times: [Duration; 2],
}

impl<L> Filled<L> {
    fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    pub(super) fn image_bytes(&self) -> usize {
        3 * self.size[0] * self.size[1]
    }

    /// Has `write` write the image of the next label into its slot.
    fn write(
        &mut self,
        size: [usize; 2],
        write: impl FnOnce(&mut [u8]) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        if size != self.size {
            let [expected, found] = [self.size, size].map(|[height, width]| vec![3, height, width]);
            let (position, others) = (self.labels.len(), Vec::new());
            return Err(DataError::ShapeMismatch { position, expected, found, others });
        }
        let (bytes, position) = (self.image_bytes(), self.labels.len());
        write(&mut self.buffer.as_mut_slice()[position * bytes..][..bytes])
    }
}
