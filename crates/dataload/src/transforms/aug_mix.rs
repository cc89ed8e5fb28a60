//! Mixtures of augmented images.

use super::drawing::{Drawing, drawing_options};
use super::operation::Operation;
use super::rand_augment::Space;
use crate::{Canvas, DataError, Draws, Interpolation, Size, Transform};

/// The levels of severity.
const LEVELS: usize = 10;

/// Without brightness, colour, contrast and sharpness, the last four.
const OPERATIONS: [Operation; 13] = [
    Operation::ShearX,
    Operation::ShearY,
    Operation::TranslateX,
    Operation::TranslateY,
    Operation::Rotate,
    Operation::Posterize,
    Operation::Solarize,
    Operation::AutoContrast,
    Operation::Equalize,
    Operation::Brightness,
    Operation::Color,
    Operation::Contrast,
    Operation::Sharpness,
];

/// Mixes the image with several versions of it, each changed by a chain of random operations.
///
/// ```
/// use overdrive_dataload::{AugMix, ImagePipeline, RandomResizedCrop};
///
/// let train = ImagePipeline::new(0).then(RandomResizedCrop::new(224)).then(AugMix::new().severity(5)?);
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// # Source
/// `torchvision.transforms.AugMix`; Hendrycks et al., "AugMix: A Simple Data Processing Method to Improve Robustness and
/// Uncertainty" (2020). Torchvision converts an image to a tensor before, whose operations round in another way than
/// those on Pillow images, which are taken here. As there, an image with boxes, masks or key points is refused: the
/// mixture would show them in several places.
#[derive(Clone, Copy, Debug)]
pub struct AugMix {
    severity: usize,
    mixture_width: usize,
    chain_depth: Option<usize>,
    alpha: f64,
    space: Space,
    drawing: Drawing,
}

impl AugMix {
    /// Torchvision's defaults: three chains of one to three operations, of severity up to 3 of 10.
    pub fn new() -> Self {
        let space =
            Space { operations: &OPERATIONS, bins: LEVELS, shear: 0.3, degrees: 30.0, change: 0.9, bits: [4.0, 4.0] };
        let drawing = Drawing::new(Interpolation::Bilinear);
        Self { severity: 3, mixture_width: 3, chain_depth: None, alpha: 1.0, space, drawing }
    }

    /// The highest level of an operation, 1 to 10; 3 unless set.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for another number.
    pub fn severity(mut self, severity: usize) -> Result<Self, DataError> {
        if !(1..=LEVELS).contains(&severity) {
            return Err(DataError::option("severity", format!("1 to {LEVELS}"), severity));
        }
        self.severity = severity;
        Ok(self)
    }

    /// How many changed versions there are; 3 unless set.
    pub fn mixture_width(mut self, mixture_width: usize) -> Self {
        self.mixture_width = mixture_width;
        self
    }

    /// How many operations change each version; a random number from 1 to 3 unless set.
    pub fn chain_depth(mut self, chain_depth: usize) -> Self {
        self.chain_depth = Some(chain_depth);
        self
    }

    /// The parameter of the distributions of the shares in the mixture: the higher it is, the more even they are; 1
    /// unless set.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for one that is not above 0 and finite.
    pub fn alpha(mut self, alpha: f64) -> Result<Self, DataError> {
        if !(alpha > 0.0 && alpha.is_finite()) {
            return Err(DataError::option("alpha", "a finite number above 0", alpha));
        }
        self.alpha = alpha;
        Ok(self)
    }

    /// Whether brightness, colour, contrast and sharpness are among the operations; on unless set.
    pub fn all_ops(mut self, all_ops: bool) -> Self {
        self.space.operations = if all_ops { &OPERATIONS } else { &OPERATIONS[..9] };
        self
    }

    drawing_options!("bilinearly");

    /// An operation's magnitude at a level below the severity, in an image of this size, without its sign: half of those
    /// that have one are negative.
    pub fn magnitude_of(&self, operation: Operation, level: usize, size: impl Into<Size>) -> f64 {
        self.space.magnitude(operation, level.min(LEVELS - 1), reach(size.into()))
    }

    /// Mixes the image with given versions of it: each has its share of `changed`, and the operations that make it, with
    /// their magnitudes; the image itself has the share `1 - changed`.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for an image with boxes, masks or key points; an error of the decoder.
    pub fn with_chains(
        &self,
        canvas: &mut Canvas<'_>,
        changed: f64,
        chains: &[(f64, Vec<(Operation, f64)>)],
    ) -> Result<(), DataError> {
        refuse_targets(canvas)?;
        let image = canvas.pixels()?.to_vec();
        let share = (1.0 - changed) as f32;
        let mut mixture: Vec<[f32; 3]> = Vec::with_capacity(image.len());
        mixture.extend(
            image.iter().map(|&[red, green, blue, _]| [red, green, blue].map(|value| share * f32::from(value))),
        );
        for (share, operations) in chains {
            canvas.pixels()?.copy_from_slice(&image);
            for &(operation, magnitude) in operations {
                operation.apply(canvas, magnitude, self.drawing.interpolation, self.drawing.fill)?;
            }
            let share = (share * changed) as f32;
            for (sum, pixel) in mixture.iter_mut().zip(canvas.pixels()?) {
                *sum = std::array::from_fn(|channel| sum[channel] + share * f32::from(pixel[channel]));
            }
        }
        for (pixel, sum) in canvas.pixels()?.iter_mut().zip(mixture) {
            let [red, green, blue] = sum.map(|value| value as u8);
            *pixel = [red, green, blue, 0];
        }
        Ok(())
    }
}

/// The most pixels that an image moves to the right and down.
fn reach(size: Size) -> [f64; 2] {
    [size.width, size.height].map(|side| side as f64 / 3.0)
}

fn refuse_targets(canvas: &mut Canvas<'_>) -> Result<(), DataError> {
    let mut moves = false;
    canvas.visit_target(&mut |_| moves = true);
    match moves {
        true => Err(DataError::option("AugMix", "an image without boxes, masks and key points", "such a target")),
        false => Ok(()),
    }
}

impl Default for AugMix {
    /// [`AugMix::new`].
    fn default() -> Self {
        Self::new()
    }
}

impl Transform for AugMix {
    fn apply(&self, canvas: &mut Canvas<'_>, draws: &mut Draws) -> Result<(), DataError> {
        let reach = reach(Size { height: canvas.height(), width: canvas.width() });
        let changed = draws.beta(self.alpha);
        let shares = draws.dirichlet(self.alpha, self.mixture_width);
        let chain = |share| {
            let depth = self.chain_depth.unwrap_or_else(|| 1 + draws.below(3));
            let operation = |_| self.space.draw(reach, draws, |draws| draws.below(self.severity));
            (share, (0..depth).map(operation).collect::<Vec<_>>())
        };
        let chains: Vec<_> = shares.into_iter().map(chain).collect();
        // Without versions of it, the image stays as it is.
        self.with_chains(canvas, if chains.is_empty() { 0.0 } else { changed }, &chains)
    }
}
