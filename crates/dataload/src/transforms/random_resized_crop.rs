//! Random crops, resized to one size.

use std::ops::RangeInclusive;

use crate::{Canvas, DataError, Draws, Interpolation, Region, Size, Transform};

/// Random regions that are tried before falling back to the middle of the image.
const TRIES: usize = 10;

/// Crops a random region of random area and aspect ratio, and resizes it to `size`.
///
/// # Source
/// `torchvision.transforms.RandomResizedCrop`.
#[derive(Clone, Debug)]
pub struct RandomResizedCrop {
    size: Size,
    scale: RangeInclusive<f64>,
    ratio: RangeInclusive<f64>,
    interpolation: Interpolation,
    antialias: bool,
}

/// The ratios of sides that may be drawn.
pub(super) fn positive(ratio: RangeInclusive<f64>) -> Result<RangeInclusive<f64>, DataError> {
    match *ratio.start() > 0.0 && ratio.start() <= ratio.end() && ratio.end().is_finite() {
        true => Ok(ratio),
        false => Err(DataError::option("ratio", "a finite range above 0", format!("{ratio:?}"))),
    }
}

impl RandomResizedCrop {
    /// Crops resized to this size: one side of a square, or `[height, width]`.
    pub fn new(size: impl Into<Size>) -> Self {
        Self {
            size: size.into(),
            scale: 0.08..=1.0,
            ratio: 3.0 / 4.0..=4.0 / 3.0,
            interpolation: Interpolation::default(),
            antialias: true,
        }
    }

    /// The crop's share of the image's area; from 0.08 to 1 unless set.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a range that is empty or not within 0 (excluded) to 1.
    pub fn scale(mut self, scale: RangeInclusive<f64>) -> Result<Self, DataError> {
        if !(*scale.start() > 0.0 && scale.start() <= scale.end() && *scale.end() <= 1.0) {
            return Err(DataError::option("scale", "a range above 0 and up to 1", format!("{scale:?}")));
        }
        self.scale = scale;
        Ok(self)
    }

    /// The crop's width divided by its height; from 3/4 to 4/3 unless set.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a range that is empty, infinite or not above 0.
    pub fn ratio(mut self, ratio: RangeInclusive<f64>) -> Result<Self, DataError> {
        self.ratio = positive(ratio)?;
        Ok(self)
    }

    /// The interpolation; bilinear unless set.
    pub fn interpolation(mut self, interpolation: Interpolation) -> Self {
        self.interpolation = interpolation;
        self
    }

    /// Whether downscaling is antialiased, so that every pixel contributes; on unless set.
    pub fn antialias(mut self, antialias: bool) -> Self {
        self.antialias = antialias;
        self
    }

    /// The region to crop from an image of this size.
    #[doc(alias = "get_params")]
    pub fn region(&self, height: usize, width: usize, draws: &mut Draws) -> Region {
        let area = height as f64 * width as f64;
        let (least, most) = (self.ratio.start().ln(), self.ratio.end().ln());
        for _ in 0..TRIES {
            let target = area * draws.uniform(*self.scale.start(), *self.scale.end());
            let ratio = draws.uniform(least, most).exp();
            let w = (target * ratio).sqrt().round_ties_even() as usize;
            let h = (target / ratio).sqrt().round_ties_even() as usize;
            if (1..=width).contains(&w) && (1..=height).contains(&h) {
                let top = draws.below(height - h + 1);
                let left = draws.below(width - w + 1);
                return Region { top, left, height: h, width: w };
            }
        }
        self.middle(height, width)
    }

    /// The largest region in the middle whose aspect ratio is allowed.
    fn middle(&self, height: usize, width: usize) -> Region {
        let ratio = width as f64 / height as f64;
        let (least, most) = (*self.ratio.start(), *self.ratio.end());
        let rounded = |side: f64, most: usize| (side.round_ties_even() as usize).clamp(1, most.max(1));
        let (h, w) = if ratio < least {
            (rounded(width as f64 / least, height), width)
        } else if ratio > most {
            (height, rounded(height as f64 * most, width))
        } else {
            (height, width)
        };
        Region { top: (height - h) / 2, left: (width - w) / 2, height: h, width: w }
    }
}

impl Transform for RandomResizedCrop {
    fn apply(&self, canvas: &mut Canvas<'_>, draws: &mut Draws) -> Result<(), DataError> {
        let region = self.region(canvas.height(), canvas.width(), draws);
        canvas.crop(region)?;
        canvas.resize(self.size, self.interpolation, self.antialias)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_fit_and_cover_the_ranges() -> Result<(), DataError> {
        let crop = RandomResizedCrop::new(224);
        let draws = 200_000;
        let regions: Vec<_> = (0..draws).map(|i| crop.region(375, 500, &mut Draws::new(0, 0, i, 0))).collect();
        assert!(regions.iter().all(|region| region.fits(375, 500)));
        let share = |region: &Region| (region.height * region.width) as f64 / (375.0 * 500.0);
        assert!(regions.iter().all(|region| (0.079..1.001).contains(&share(region))));
        // Mean and standard deviation of 300,000 draws of torchvision 0.26, whose distribution is the same.
        type Of = fn(&Region) -> f64;
        let torchvision: [(Of, f64, f64); 5] = [
            (|region| (region.height * region.width) as f64 / (375.0 * 500.0), 0.43325, 0.21652),
            (|region| region.top as f64, 52.403, 50.787),
            (|region| region.left as f64, 109.121, 80.569),
            (|region| region.height as f64, 270.213, 70.244),
            (|region| region.width as f64, 281.815, 86.263),
        ];
        for (of, expected, deviation) in torchvision {
            let mean = regions.iter().map(of).sum::<f64>() / draws as f64;
            // Five standard errors of the difference of the two means.
            let error = deviation * (1.0 / draws as f64 + 1.0 / 300_000.0).sqrt();
            assert!((mean - expected).abs() < 5.0 * error, "{mean} for {expected}");
        }
        for (height, width) in [(1, 1), (1, 20_000), (20_000, 1), (3, 2)] {
            assert!(crop.region(height, width, &mut Draws::new(1, 0, 0, 0)).fits(height, width));
        }
        let long = RandomResizedCrop::new(8).region(100, 1000, &mut Draws::new(0, 0, 0, 0));
        assert_eq!((long.height, long.width, long.left), (100, 133, 433));
        assert!(RandomResizedCrop::new(1).scale(0.0..=1.0).is_err());
        assert!(RandomResizedCrop::new(1).ratio(1.0..=f64::INFINITY).is_err());
        Ok(())
    }
}
