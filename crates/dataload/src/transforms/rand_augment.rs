//! Random operations of one strength.

use super::drawing::{Drawing, drawing_options};
use super::operation::Operation;
use crate::{Canvas, DataError, Draws, Interpolation, Size, Transform};

/// What can be drawn: each operation, with its magnitude at a level.
#[derive(Clone, Copy, Debug)]
pub(super) struct Space {
    pub(super) operations: &'static [Operation],
    pub(super) bins: usize,
    pub(super) shear: f32,
    pub(super) degrees: f32,
    /// Of brightness, colour, contrast and sharpness.
    pub(super) change: f32,
    /// The bits that are kept at the lowest level, and how many fewer at the highest.
    pub(super) bits: [f32; 2],
}

/// The operations of RandAugment and TrivialAugment.
const OPERATIONS: [Operation; 14] = [
    Operation::Identity,
    Operation::ShearX,
    Operation::ShearY,
    Operation::TranslateX,
    Operation::TranslateY,
    Operation::Rotate,
    Operation::Brightness,
    Operation::Color,
    Operation::Contrast,
    Operation::Sharpness,
    Operation::Posterize,
    Operation::Solarize,
    Operation::AutoContrast,
    Operation::Equalize,
];

impl Space {
    /// An operation's magnitude at a level, without its sign; `reach` is the most pixels to the right and down.
    pub(super) fn magnitude(&self, operation: Operation, level: usize, reach: [f64; 2]) -> f64 {
        let up_to = |end: f32| f64::from(linspace(0.0, end, self.bins, level));
        match operation {
            Operation::ShearX | Operation::ShearY => up_to(self.shear),
            Operation::TranslateX => up_to(reach[0] as f32),
            Operation::TranslateY => up_to(reach[1] as f32),
            Operation::Rotate => up_to(self.degrees),
            Operation::Brightness | Operation::Color | Operation::Contrast | Operation::Sharpness => up_to(self.change),
            Operation::Posterize => {
                let [most, fewer] = self.bits;
                let fewer = level as f32 / ((self.bins - 1) as f32 / fewer);
                f64::from(most - fewer.round_ties_even())
            }
            Operation::Solarize => f64::from(linspace(255.0, 0.0, self.bins, level)),
            _ => 0.0,
        }
    }

    /// A random operation, and its magnitude at a level that `level` draws where it has one.
    pub(super) fn draw(
        &self,
        reach: [f64; 2],
        draws: &mut Draws,
        level: impl FnOnce(&mut Draws) -> usize,
    ) -> (Operation, f64) {
        let operation = self.operations[draws.below(self.operations.len())];
        let level = level(draws);
        let magnitude = self.magnitude(operation, level, reach);
        let signed = !matches!(operation, Operation::Posterize | Operation::Solarize);
        (operation, if signed && draws.chance(0.5) { -magnitude } else { magnitude })
    }
}

/// Number `index` of `steps` evenly spaced numbers, to the last bit of `torch.linspace`: a move by 16 pixels, for
/// example, is one by 15.99.., which counts as 15.
fn linspace(start: f32, end: f32, steps: usize, index: usize) -> f32 {
    if steps < 2 {
        return start;
    }
    let step = (end - start) / (steps - 1) as f32;
    let from = |base: f32, steps: usize, step: f32| step.mul_add(steps as f32, base);
    if index < steps / 2 { from(start, index, step) } else { from(end, steps - 1 - index, -step) }
}

fn magnitude_bins(bins: usize, magnitude: usize) -> Result<usize, DataError> {
    match bins > magnitude.max(1) {
        true => Ok(bins),
        false => Err(DataError::option("num_magnitude_bins", format!("more than {}", magnitude.max(1)), bins)),
    }
}

/// Applies random operations, one after the other, all of one magnitude.
///
/// ```
/// use overdrive_dataload::{ImagePipeline, RandAugment, RandomResizedCrop};
///
/// let train = ImagePipeline::new(0).then(RandomResizedCrop::new(224)).then(RandAugment::new().magnitude(7)?);
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// # Source
/// `torchvision.transforms.RandAugment` on Pillow images, whose pixels it has; Cubuk et al., "RandAugment: Practical
/// Automated Data Augmentation with a Reduced Search Space" (2020).
#[derive(Clone, Copy, Debug)]
pub struct RandAugment {
    num_ops: usize,
    magnitude: usize,
    space: Space,
    drawing: Drawing,
}

impl RandAugment {
    /// Torchvision's defaults: two operations of magnitude 9 of 31.
    pub fn new() -> Self {
        let space =
            Space { operations: &OPERATIONS, bins: 31, shear: 0.3, degrees: 30.0, change: 0.9, bits: [8.0, 4.0] };
        Self { num_ops: 2, magnitude: 9, space, drawing: Drawing::new(Interpolation::Nearest) }
    }

    /// How many operations follow each other; 2 unless set.
    pub fn num_ops(mut self, num_ops: usize) -> Self {
        self.num_ops = num_ops;
        self
    }

    /// The magnitude of every operation, a number below that of the bins; 9 unless set.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for one that is not below [`num_magnitude_bins`](Self::num_magnitude_bins).
    pub fn magnitude(mut self, magnitude: usize) -> Result<Self, DataError> {
        if magnitude >= self.space.bins {
            return Err(DataError::option("magnitude", format!("a number below {}", self.space.bins), magnitude));
        }
        self.magnitude = magnitude;
        Ok(self)
    }

    /// How many magnitudes there are; 31 unless set.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a number that is not above the magnitude, or below 2.
    pub fn num_magnitude_bins(mut self, bins: usize) -> Result<Self, DataError> {
        self.space.bins = magnitude_bins(bins, self.magnitude)?;
        Ok(self)
    }

    drawing_options!("the nearest one");

    /// The magnitude that an operation has in an image of this size, without its sign: half of those that have one are
    /// negative.
    pub fn magnitude_of(&self, operation: Operation, size: impl Into<Size>) -> f64 {
        self.space.magnitude(operation, self.magnitude, Self::reach(size.into()))
    }

    fn reach(size: Size) -> [f64; 2] {
        [size.width, size.height].map(|side| 150.0 / 331.0 * side as f64)
    }
}

impl Default for RandAugment {
    /// [`RandAugment::new`].
    fn default() -> Self {
        Self::new()
    }
}

impl Transform for RandAugment {
    fn apply(&self, canvas: &mut Canvas<'_>, draws: &mut Draws) -> Result<(), DataError> {
        let reach = Self::reach(Size { height: canvas.height(), width: canvas.width() });
        for _ in 0..self.num_ops {
            let (operation, magnitude) = self.space.draw(reach, draws, |_| self.magnitude);
            operation.apply(canvas, magnitude, self.drawing.interpolation, self.drawing.fill)?;
        }
        Ok(())
    }
}

/// Applies one random operation of a random magnitude.
///
/// ```
/// use overdrive_dataload::{ImagePipeline, RandomResizedCrop, TrivialAugmentWide};
///
/// let train = ImagePipeline::new(0).then(RandomResizedCrop::new(224)).then(TrivialAugmentWide::new());
/// ```
///
/// # Source
/// `torchvision.transforms.TrivialAugmentWide` on Pillow images, whose pixels it has; Müller and Hutter,
/// "TrivialAugment: Tuning-free Yet State-of-the-Art Data Augmentation" (2021).
#[derive(Clone, Copy, Debug)]
#[doc(alias = "TrivialAugment")]
pub struct TrivialAugmentWide {
    space: Space,
    drawing: Drawing,
}

impl TrivialAugmentWide {
    /// Torchvision's defaults.
    pub fn new() -> Self {
        let space =
            Space { operations: &OPERATIONS, bins: 31, shear: 0.99, degrees: 135.0, change: 0.99, bits: [8.0, 6.0] };
        Self { space, drawing: Drawing::new(Interpolation::Nearest) }
    }

    /// How many magnitudes there are; 31 unless set.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for fewer than 2.
    pub fn num_magnitude_bins(mut self, bins: usize) -> Result<Self, DataError> {
        self.space.bins = magnitude_bins(bins, 0)?;
        Ok(self)
    }

    drawing_options!("the nearest one");

    /// An operation's magnitude at a level below the number of bins, without its sign: half of those that have one are
    /// negative.
    pub fn magnitude_of(&self, operation: Operation, level: usize) -> f64 {
        self.space.magnitude(operation, level.min(self.space.bins - 1), [32.0; 2])
    }
}

impl Default for TrivialAugmentWide {
    /// [`TrivialAugmentWide::new`].
    fn default() -> Self {
        Self::new()
    }
}

impl Transform for TrivialAugmentWide {
    fn apply(&self, canvas: &mut Canvas<'_>, draws: &mut Draws) -> Result<(), DataError> {
        let (operation, magnitude) = self.space.draw([32.0; 2], draws, |draws| draws.below(self.space.bins));
        operation.apply(canvas, magnitude, self.drawing.interpolation, self.drawing.fill)
    }
}
