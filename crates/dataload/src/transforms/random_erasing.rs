//! Random rectangles that are erased.

use std::ops::RangeInclusive;

use tch::Tensor;

use crate::{Canvas, DataError, Draws, Region, Transform};

/// Rectangles that are tried before an image stays as it is.
const TRIES: usize = 10;

/// What takes the place of erased pixels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ErasingValue {
    /// A value for red, green and blue: in a [`Transform`], a level from 0 to 255.
    Constant([f64; 3]),
    /// Another random value at each place: from the standard normal distribution in a tensor, any level in a
    /// [`Transform`].
    Random,
}

/// Erases a random rectangle, with probability `p`.
///
/// As a [`Transform`] it erases pixels, before they are normalized; [`apply_batch`](Self::apply_batch) erases in a normalized batch,
/// where 0 is the mean colour.
///
/// ```
/// use overdrive_dataload::{Draws, RandomErasing};
/// use tch::{Device, Kind, Tensor};
///
/// let erasing = RandomErasing::new().p(1.0)?;
/// let images = Tensor::ones([4, 3, 32, 32], (Kind::Float, Device::Cpu));
/// // A batch has random numbers of its own; its number, or a counter, sets them apart.
/// let erased = erasing.apply_batch(&images, &mut Draws::new(0, 0, 0, 0))?;
/// assert!(erased.sum(Kind::Float).double_value(&[]) < 4.0 * 3.0 * 32.0 * 32.0);
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// # Source
/// `torchvision.transforms.RandomErasing`; Zhong et al., "Random Erasing Data Augmentation" (2017). In a batch every
/// image has a rectangle of its own.
#[derive(Clone, Debug)]
pub struct RandomErasing {
    p: f64,
    scale: RangeInclusive<f64>,
    ratio: RangeInclusive<f64>,
    value: ErasingValue,
}

impl RandomErasing {
    /// Torchvision's defaults.
    pub fn new() -> Self {
        Self { p: 0.5, scale: 0.02..=0.33, ratio: 0.3..=3.3, value: ErasingValue::Constant([0.0; 3]) }
    }

    /// The probability that an image has a rectangle; 0.5 unless set.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a `p` outside 0 to 1.
    pub fn p(mut self, p: f64) -> Result<Self, DataError> {
        self.p = super::flip::probability(p)?;
        Ok(self)
    }

    /// The rectangle's share of the image's area; from 0.02 to 0.33 unless set.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a range that is empty or not within 0 to 1.
    pub fn scale(mut self, scale: RangeInclusive<f64>) -> Result<Self, DataError> {
        if !(*scale.start() >= 0.0 && scale.start() <= scale.end() && *scale.end() <= 1.0) {
            return Err(DataError::option("scale", "a range from 0 to 1", format!("{scale:?}")));
        }
        self.scale = scale;
        Ok(self)
    }

    /// The rectangle's height divided by its width; from 0.3 to 3.3 unless set.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a range that is empty, infinite or not above 0.
    pub fn ratio(mut self, ratio: RangeInclusive<f64>) -> Result<Self, DataError> {
        self.ratio = super::random_resized_crop::positive(ratio)?;
        Ok(self)
    }

    /// What takes the place of erased pixels; 0 unless set.
    pub fn value(mut self, value: ErasingValue) -> Self {
        self.value = value;
        self
    }

    /// The rectangle to erase in an image of this size, whatever `p` is; `None` where none fits.
    #[doc(alias = "get_params")]
    pub fn region(&self, height: usize, width: usize, draws: &mut Draws) -> Option<Region> {
        let area = height as f64 * width as f64;
        let (least, most) = (self.ratio.start().ln(), self.ratio.end().ln());
        for _ in 0..TRIES {
            let target = area * draws.uniform(*self.scale.start(), *self.scale.end());
            let ratio = draws.uniform(least, most).exp();
            let rows = (target * ratio).sqrt().round_ties_even() as usize;
            let columns = (target / ratio).sqrt().round_ties_even() as usize;
            if rows < height && columns < width {
                let (top, left) = (draws.below(height - rows + 1), draws.below(width - columns + 1));
                return Some(Region { top, left, height: rows, width: columns });
            }
        }
        None
    }

    fn drawn(&self, height: usize, width: usize, draws: &mut Draws) -> Option<Region> {
        let region = if draws.chance(self.p) { self.region(height, width, draws) } else { None };
        region.filter(|region| region.fits(height, width))
    }

    /// Erases a rectangle in each image of a batch, in a copy; `draws` are the batch's random numbers.
    ///
    /// # Shapes
    /// `[N, 3, H, W]` of any kind gives the same; with [`ErasingValue::Random`], `[N, C, H, W]`.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for images of another shape; [`DataError::Tensor`].
    pub fn apply_batch(&self, images: &Tensor, draws: &mut Draws) -> Result<Tensor, DataError> {
        let &[count, channels, height, width] = images.size().as_slice() else {
            return Err(DataError::option("images", "the shape [N, C, H, W]", format!("{:?}", images.size())));
        };
        if channels != 3 && self.value != ErasingValue::Random {
            return Err(DataError::option("images", "3 channels, as the value has", channels));
        }
        let mut erased = images.f_empty_like()?;
        erased.f_copy_(images)?;
        for image in 0..count {
            let Some(region) = self.drawn(height as usize, width as usize, draws) else { continue };
            let [top, left, height, width] =
                [region.top, region.left, region.height, region.width].map(|pixels| pixels as i64);
            let (values, shape) = match self.value {
                ErasingValue::Constant(value) => (value.map(|value| value as f32).to_vec(), [3, 1, 1]),
                ErasingValue::Random => {
                    let normals = (0..channels * height * width).map(|_| draws.normal() as f32);
                    (normals.collect(), [channels, height, width])
                }
            };
            let values = Tensor::f_from_slice(&values)?.f_view(shape)?;
            erased.f_select(0, image)?.f_narrow(1, top, height)?.f_narrow(2, left, width)?.f_copy_(&values)?;
        }
        Ok(erased)
    }
}

impl Default for RandomErasing {
    /// [`RandomErasing::new`].
    fn default() -> Self {
        Self::new()
    }
}

impl Transform for RandomErasing {
    fn apply(&self, canvas: &mut Canvas<'_>, draws: &mut Draws) -> Result<(), DataError> {
        let Some(region) = self.drawn(canvas.height(), canvas.width(), draws) else { return Ok(()) };
        let width = canvas.width();
        let rows = canvas.pixels()?.chunks_exact_mut(width).skip(region.top).take(region.height);
        for pixel in rows.flat_map(|row| &mut row[region.left..][..region.width]) {
            let [red, green, blue] = match self.value {
                ErasingValue::Constant(value) => value.map(|level| level.round() as u8),
                ErasingValue::Random => {
                    let [red, green, blue, ..] = draws.bits().to_le_bytes();
                    [red, green, blue]
                }
            };
            *pixel = [red, green, blue, 0];
        }
        Ok(())
    }
}
