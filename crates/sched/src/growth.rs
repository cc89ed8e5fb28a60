//! Image sizes and batch sizes that grow during training.

use crate::ScheduleError;
use crate::error::Check;

/// A size that grows linearly between two whole numbers, in multiples of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Growth {
    from: u64,
    to: u64,
    begin: u64,
    steps: u64,
    multiple_of: u64,
}

impl Growth {
    fn new(check: Check, from: u64, to: u64, steps: u64) -> Result<Self, ScheduleError> {
        check.at_least_1("from", from)?;
        check.that(to >= from, "to", format_args!("at least `from` ({from})"), to)?;
        check.at_least_1("steps", steps)?;
        Ok(Self { from, to, begin: 0, steps, multiple_of: 1 })
    }

    fn multiple_of(self, check: Check, multiple_of: u64) -> Result<Self, ScheduleError> {
        check.at_least_1("multiple_of", multiple_of)?;
        let holds = self.from.is_multiple_of(multiple_of) && self.to.is_multiple_of(multiple_of);
        let expected = format_args!("a divisor of both {} and {}", self.from, self.to).to_string();
        check.that(holds, "multiple_of", expected, multiple_of)?;
        Ok(Self { multiple_of, ..self })
    }

    /// The size at a step, rounded down to a multiple, so that `to` is reached only at the end.
    fn at(&self, step: u64) -> u64 {
        let since = u128::from(step.saturating_sub(self.begin).min(self.steps));
        let units = u128::from((self.to - self.from) / self.multiple_of);
        let grown = units * since / u128::from(self.steps);
        self.from + self.multiple_of * u64::try_from(grown).unwrap_or(u64::MAX)
    }
}

/// The side length of the images at a step: small images first, because they train faster.
///
/// A step can be any unit, as long as it is the same in all calls; here it is an epoch.
///
/// ```
/// use overdrive_sched::ProgressiveResize;
///
/// let resize = ProgressiveResize::new(128, 224, 30)?.multiple_of(32)?.delay(10);
/// let sides: Vec<_> = [0, 10, 20, 30, 40].map(|epoch| resize.side(epoch)).into();
/// assert_eq!(sides, [128, 128, 160, 192, 224]);
/// # Ok::<(), overdrive_sched::ScheduleError>(())
/// ```
///
/// # Source
/// Howard et al. (fast.ai, 2018); Tan and Le, "EfficientNetV2" (2021); Composer's `ProgressiveResizing`.
#[doc(alias = "ProgressiveResizing")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "it only computes how large the images should be"]
pub struct ProgressiveResize(Growth);

const RESIZE: Check = Check("ProgressiveResize");

impl ProgressiveResize {
    /// Grows from one side length to another, in pixels, within `steps`.
    ///
    /// # Errors
    /// When `from` or `steps` is 0, or `to` is below `from`.
    pub fn new(from: u64, to: u64, steps: u64) -> Result<Self, ScheduleError> {
        Growth::new(RESIZE, from, to, steps).map(Self)
    }

    /// Uses only multiples of this many pixels, such as a network's stride.
    ///
    /// # Errors
    /// When it is 0, or does not divide both `from` and `to`.
    pub fn multiple_of(self, pixels: u64) -> Result<Self, ScheduleError> {
        self.0.multiple_of(RESIZE, pixels).map(Self)
    }

    /// Starts to grow after this many steps; default 0.
    pub fn delay(mut self, steps: u64) -> Self {
        self.0.begin = steps;
        self
    }

    /// The side length at a step, in pixels.
    pub fn side(&self, step: u64) -> u64 {
        self.0.at(step)
    }
}

/// The batch size at a step: small batches first, because early in training they learn more from each sample.
///
/// ```
/// use overdrive_sched::BatchSizeWarmup;
///
/// let warm_up = BatchSizeWarmup::new(32, 256, 1000)?.multiple_of(32)?;
/// assert_eq!((warm_up.size(0), warm_up.size(500), warm_up.size(1000)), (32, 128, 256));
/// # Ok::<(), overdrive_sched::ScheduleError>(())
/// ```
///
/// # Source
/// Brown et al., "Language Models are Few-Shot Learners" (2020), and Megatron-LM's `--rampup-batch-size`; Smith et al.,
/// "Don't Decay the Learning Rate, Increase the Batch Size" (2018).
#[doc(alias = "rampup_batch_size")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "it only computes how large the batches should be"]
pub struct BatchSizeWarmup(Growth);

const BATCH: Check = Check("BatchSizeWarmup");

impl BatchSizeWarmup {
    /// Grows from one size to another, in samples, within `steps`.
    ///
    /// # Errors
    /// When `from` or `steps` is 0, or `to` is below `from`.
    pub fn new(from: u64, to: u64, steps: u64) -> Result<Self, ScheduleError> {
        Growth::new(BATCH, from, to, steps).map(Self)
    }

    /// Uses only multiples of this many samples, such as the number of ranks times the micro-batch size.
    ///
    /// # Errors
    /// When it is 0, or does not divide both `from` and `to`.
    pub fn multiple_of(self, samples: u64) -> Result<Self, ScheduleError> {
        self.0.multiple_of(BATCH, samples).map(Self)
    }

    /// Starts to grow after this many steps; default 0.
    pub fn delay(mut self, steps: u64) -> Self {
        self.0.begin = steps;
        self
    }

    /// The size at a step, in samples.
    pub fn size(&self, step: u64) -> u64 {
        self.0.at(step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_grow_in_multiples_and_stay_at_the_end() -> Result<(), ScheduleError> {
        let growth = BatchSizeWarmup::new(24, 96, 7)?.multiple_of(8)?.delay(3);
        let sizes: Vec<_> = (0..14).map(|step| growth.size(step)).collect();
        assert_eq!(sizes, [24, 24, 24, 24, 32, 40, 48, 64, 72, 80, 96, 96, 96, 96]);
        assert_eq!(growth.size(u64::MAX), 96);
        let huge = ProgressiveResize::new(1, u64::MAX, u64::MAX)?;
        assert_eq!((huge.side(0), huge.side(u64::MAX)), (1, u64::MAX));
        Ok(())
    }

    #[test]
    fn options_out_of_range_are_named() {
        let option = |result: Result<ProgressiveResize, ScheduleError>| match result {
            Err(ScheduleError::InvalidOption { option, .. }) => option,
            other => panic!("{other:?}"),
        };
        assert_eq!(option(ProgressiveResize::new(0, 8, 1)), "from");
        assert_eq!(option(ProgressiveResize::new(9, 8, 1)), "to");
        assert_eq!(option(ProgressiveResize::new(8, 8, 0)), "steps");
        let sides = || ProgressiveResize::new(128, 224, 1);
        assert_eq!(option(sides().and_then(|it| it.multiple_of(0))), "multiple_of");
        assert_eq!(option(sides().and_then(|it| it.multiple_of(64))), "multiple_of");
    }
}
