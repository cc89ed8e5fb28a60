//! Random rotations and affine maps.

use std::ops::RangeInclusive;

use super::affine::{affine, transform};
use super::drawing::{Drawing, drawing_options};
use super::operation::Operation;
use crate::{Canvas, DataError, Draws, Interpolation, Transform};

/// Turns an image around its middle by a random angle.
///
/// ```
/// use overdrive_dataload::{ImagePipeline, RandomRotation};
///
/// let train = ImagePipeline::new(0).then(RandomRotation::new(-15.0..=15.0)?);
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// # Source
/// `torchvision.transforms.RandomRotation` on Pillow images, without `expand` and `center`.
#[derive(Clone, Debug)]
pub struct RandomRotation {
    degrees: RangeInclusive<f64>,
    drawing: Drawing,
}

impl RandomRotation {
    /// Turns counter-clockwise by a number of degrees from this range.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a range that is empty or infinite.
    pub fn new(degrees: RangeInclusive<f64>) -> Result<Self, DataError> {
        let degrees = finite("degrees", degrees)?;
        Ok(Self { degrees, drawing: Drawing::new(Interpolation::Nearest) })
    }

    drawing_options!("the nearest one");
}

impl Transform for RandomRotation {
    fn apply(&self, canvas: &mut Canvas<'_>, draws: &mut Draws) -> Result<(), DataError> {
        let angle = draws.uniform(*self.degrees.start(), *self.degrees.end());
        Operation::Rotate.apply(canvas, angle, self.drawing.interpolation, self.drawing.fill)
    }
}

/// Turns, moves, scales and shears an image at random, around its middle.
///
/// ```
/// use overdrive_dataload::{ImagePipeline, RandomAffine};
///
/// let train = ImagePipeline::new(0).then(RandomAffine::new(-10.0..=10.0)?.translate([0.1, 0.1])?.scale(0.8..=1.2)?);
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// # Source
/// `torchvision.transforms.RandomAffine` on Pillow images, without `center`.
#[derive(Clone, Debug)]
pub struct RandomAffine {
    degrees: RangeInclusive<f64>,
    translate: [f64; 2],
    scale: RangeInclusive<f64>,
    shear: [RangeInclusive<f64>; 2],
    drawing: Drawing,
}

impl RandomAffine {
    /// Turns clockwise by a number of degrees from this range; `0.0..=0.0` does not turn. Torchvision's two classes turn
    /// in opposite directions, too: [`RandomRotation`] turns counter-clockwise.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a range that is empty or infinite.
    pub fn new(degrees: RangeInclusive<f64>) -> Result<Self, DataError> {
        Ok(Self {
            degrees: finite("degrees", degrees)?,
            translate: [0.0; 2],
            scale: 1.0..=1.0,
            shear: [0.0..=0.0, 0.0..=0.0],
            drawing: Drawing::new(Interpolation::Nearest),
        })
    }

    /// The most that the image moves to either side, and up or down, as parts of its width and height; it does not
    /// unless set.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a number outside 0 to 1.
    pub fn translate(mut self, translate: [f64; 2]) -> Result<Self, DataError> {
        if !translate.iter().all(|part| (0.0..=1.0).contains(part)) {
            return Err(DataError::option("translate", "two numbers from 0 to 1", format!("{translate:?}")));
        }
        self.translate = translate;
        Ok(self)
    }

    /// By how much the image is scaled; 1 unless set.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a range that is empty, infinite or not above 0.
    pub fn scale(mut self, scale: RangeInclusive<f64>) -> Result<Self, DataError> {
        if *scale.start() <= 0.0 {
            return Err(DataError::option("scale", "a range above 0", format!("{scale:?}")));
        }
        self.scale = finite("scale", scale)?;
        Ok(self)
    }

    /// The degrees by which vertical lines are sheared, and horizontal ones; 0 unless set.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a range that is empty or reaches 90 degrees.
    pub fn shear(mut self, x: RangeInclusive<f64>, y: RangeInclusive<f64>) -> Result<Self, DataError> {
        for range in [&x, &y] {
            if range.is_empty() || *range.start() <= -90.0 || *range.end() >= 90.0 {
                return Err(DataError::option("shear", "ranges between -90 and 90 degrees", format!("{range:?}")));
            }
        }
        self.shear = [x, y];
        Ok(self)
    }

    drawing_options!("the nearest one");
}

fn finite(name: &'static str, range: RangeInclusive<f64>) -> Result<RangeInclusive<f64>, DataError> {
    match range.start() <= range.end() && (range.end() - range.start()).is_finite() {
        true => Ok(range),
        false => Err(DataError::option(name, "a finite range", format!("{range:?}"))),
    }
}

impl Transform for RandomAffine {
    fn apply(&self, canvas: &mut Canvas<'_>, draws: &mut Draws) -> Result<(), DataError> {
        let sides = [canvas.width(), canvas.height()].map(|side| side as f64);
        let mut from = |range: &RangeInclusive<f64>| draws.uniform(*range.start(), *range.end());
        let angle = from(&self.degrees);
        let most = [self.translate[0] * sides[0], self.translate[1] * sides[1]];
        let translate = most.map(|most| from(&(-most..=most)).round_ties_even());
        let scale = from(&self.scale);
        let shear = [from(&self.shear[0]), from(&self.shear[1])];
        let map = affine(sides.map(|side| side * 0.5), angle, translate, scale, shear);
        transform(canvas, map, self.drawing.interpolation, self.drawing.fill)
    }
}
