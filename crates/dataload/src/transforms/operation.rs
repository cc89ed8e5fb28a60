//! The operations that RandAugment and its kin draw from.

use super::affine::{rotation, shear, transform, translation};
use super::color_jitter::{Change, blend, look_up};
use crate::{Canvas, DataError, Interpolation, Size};

/// One operation of [`RandAugment`](crate::RandAugment), [`TrivialAugmentWide`](crate::TrivialAugmentWide) and
/// [`AugMix`](crate::AugMix), with the pixels of Pillow.
///
/// ```
/// use overdrive_dataload::{Canvas, DataError, Draws, ImagePipeline, Interpolation, Operation, Transform};
///
/// /// Inverts the values above a random one.
/// struct RandomSolarize;
///
/// impl Transform for RandomSolarize {
///     fn apply(&self, canvas: &mut Canvas<'_>, draws: &mut Draws) -> Result<(), DataError> {
///         Operation::Solarize.apply(canvas, draws.uniform(0.0, 256.0), Interpolation::Nearest, [0; 3])
///     }
/// }
///
/// let train = ImagePipeline::new(0).then(RandomSolarize);
/// ```
///
/// # Source
/// The operations of `torchvision.transforms.RandAugment` on Pillow images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// Leaves the image as it is.
    Identity,
    /// Moves each row to the left by its distance from the top, times the magnitude.
    ShearX,
    /// Moves each column up by its distance from the left, times the magnitude.
    ShearY,
    /// Moves the image to the right by the magnitude, in whole pixels.
    TranslateX,
    /// Moves the image down by the magnitude, in whole pixels.
    TranslateY,
    /// Turns the image counter-clockwise by the magnitude in degrees.
    Rotate,
    /// Scales every value by 1 plus the magnitude.
    Brightness,
    /// Scales the distance from each pixel's own grey by 1 plus the magnitude.
    Color,
    /// Scales the distance from the mean grey by 1 plus the magnitude.
    Contrast,
    /// Scales the distance from the smoothed image by 1 plus the magnitude.
    Sharpness,
    /// Keeps as many of the 8 bits of each value, the upper ones, as the magnitude says.
    Posterize,
    /// Inverts the values that are not below the magnitude.
    Solarize,
    /// Stretches each channel's values to the full range.
    AutoContrast,
    /// Spreads each channel's values evenly over the full range.
    Equalize,
    /// Inverts every value.
    Invert,
}

impl Operation {
    /// Changes an image; `interpolation` and `fill`, the colour outside of the image, are those of shearing, moving and
    /// turning.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for [`Interpolation::Bicubic`]; an error of the decoder.
    pub fn apply(
        self,
        canvas: &mut Canvas<'_>,
        magnitude: f64,
        interpolation: Interpolation,
        fill: [u8; 3],
    ) -> Result<(), DataError> {
        let (height, width) = (canvas.height(), canvas.width());
        let mut map = |inverse| transform(canvas, inverse, interpolation, fill);
        match self {
            Self::Identity => return Ok(()),
            Self::ShearX => return map(shear(magnitude, 0.0)),
            Self::ShearY => return map(shear(0.0, magnitude)),
            Self::TranslateX => return map(translation(magnitude.trunc(), 0.0)),
            Self::TranslateY => return map(translation(0.0, magnitude.trunc())),
            Self::Rotate => return map(rotation(magnitude, height, width)),
            Self::Sharpness => return sharpen(canvas, (1.0 + magnitude) as f32),
            _ => {}
        }
        // The order of the pixels does not matter to what remains.
        let pixels = canvas.colors()?;
        let table = |value: &dyn Fn(u8) -> u8| std::array::from_fn(|level| value(level as u8));
        match self {
            Self::Brightness => Change::Brightness.apply(pixels, 1.0 + magnitude),
            Self::Color => Change::Saturation.apply(pixels, 1.0 + magnitude),
            Self::Contrast => Change::Contrast.apply(pixels, 1.0 + magnitude),
            Self::Posterize => {
                let kept = 0xff00_u16 >> (magnitude as u8).min(8);
                look_up(pixels, &table(&|value| value & kept as u8));
            }
            Self::Solarize => {
                look_up(pixels, &table(&|value| if f64::from(value) < magnitude { value } else { 255 - value }));
            }
            Self::Invert => look_up(pixels, &table(&|value| 255 - value)),
            Self::AutoContrast => by_channel(pixels, stretched),
            Self::Equalize => by_channel(pixels, equalized),
            _ => {}
        }
        Ok(())
    }
}

/// Looks up each channel in the table that `table` makes of how often each value occurs in it.
fn by_channel(pixels: &mut [[u8; 4]], table: fn(&[usize; 256]) -> [u8; 256]) {
    for channel in 0..3 {
        let mut histogram = [0; 256];
        pixels.iter().for_each(|pixel| histogram[usize::from(pixel[channel])] += 1);
        let table = table(&histogram);
        pixels.iter_mut().for_each(|pixel| pixel[channel] = table[usize::from(pixel[channel])]);
    }
}

const UNCHANGED: fn(usize) -> u8 = |level| level as u8;

fn stretched(histogram: &[usize; 256]) -> [u8; 256] {
    let present = |&level: &usize| histogram[level] > 0;
    let ends = (0..256).find(present).zip((0..256).rev().find(present));
    match ends.filter(|(low, high)| low < high) {
        None => std::array::from_fn(UNCHANGED),
        Some((low, high)) => {
            let scale = 255.0 / (high - low) as f64;
            let offset = -(low as f64) * scale;
            std::array::from_fn(|level| (level as f64 * scale + offset) as u8)
        }
    }
}

fn equalized(histogram: &[usize; 256]) -> [u8; 256] {
    let last = histogram.iter().rev().find(|&&count| count > 0).copied().unwrap_or(0);
    let step = (histogram.iter().sum::<usize>() - last) / 255;
    if step == 0 {
        return std::array::from_fn(UNCHANGED);
    }
    let mut below = step / 2;
    histogram.map(|count| {
        let level = below / step;
        below += count;
        level.min(255) as u8
    })
}

/// Blends the smoothed image with the image; the outermost pixels are not smoothed.
fn sharpen(canvas: &mut Canvas<'_>, factor: f32) -> Result<(), DataError> {
    let (height, width) = (canvas.height(), canvas.width());
    canvas.redraw(Size { height, width }, |from, to| {
        to.copy_from_slice(from);
        for row in 1..height.saturating_sub(1) {
            for column in 1..width.saturating_sub(1) {
                let at = row * width + column;
                let around = [at - width, at, at + width];
                to[at] = std::array::from_fn(|channel| {
                    let sum = around.iter().flat_map(|&at| &from[at - 1..=at + 1]);
                    let sum: u32 = sum.map(|pixel| u32::from(pixel[channel])).sum();
                    // The middle counts five times; to the nearest thirteenth, which is never halfway.
                    let smooth = (2 * (sum + 4 * u32::from(from[at][channel])) + 13) / 26;
                    blend(smooth as u8, from[at][channel], factor)
                });
            }
        }
    })
}
