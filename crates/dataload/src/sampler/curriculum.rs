//! Curriculum learning: easy samples first.

use std::fmt;

use crate::rng::below;
use crate::{DataError, Philox, Sampler};

type Pacing = Box<dyn Fn(f64) -> f64 + Send + Sync>;

/// Random samples from the easiest part of the data, which grows until it is all of the data.
///
/// Draw `i` of epoch `e` takes a sample from the easiest `pacing(progress)` of the data, where progress is `(e + i /
/// num_samples) / epochs`, at most 1. Within an epoch, no sample is drawn again before all visible ones have been
/// drawn, and the visible share never shrinks. So once all data is visible, an epoch is a permutation, as with a
/// [`RandomSampler`](crate::RandomSampler).
///
/// ```
/// use overdrive_dataload::{Curriculum, Sampler, pacing};
///
/// let words = vec![31.0, 4.0, 15.0, 9.0, 26.0];
/// let curriculum = Curriculum::new(&words, 5.0, 0, pacing::root(0.2, 2.0)?)?;
/// assert_eq!(curriculum.order(0)[0], 1);
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// # Source
/// Bengio et al., "Curriculum Learning" (2009); Hacohen and Weinshall (2019) and Platanios et al. (2019) for pacing,
/// see [`pacing`](crate::pacing). They draw each batch independently, so a sample may be missed by chance.
pub struct Curriculum {
    /// The samples' indices, the easiest first.
    indices: Vec<usize>,
    epochs: f64,
    seed: u64,
    pacing: Pacing,
    num_samples: usize,
}

impl Curriculum {
    /// A curriculum over `epochs` epochs, from one score per sample: lower scores are easier, and equal ones keep the
    /// dataset's order.
    ///
    /// The result of `pacing` is clamped to 0..1; at least one sample is always visible.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a score that is NaN, or `epochs` that are not finite and above 0.
    pub fn new(
        difficulty: &[f64],
        epochs: f64,
        seed: u64,
        pacing: impl Fn(f64) -> f64 + Send + Sync + 'static,
    ) -> Result<Self, DataError> {
        if let Some(index) = difficulty.iter().position(|score| score.is_nan()) {
            return Err(DataError::option("difficulty", "numbers", format!("NaN at index {index}")));
        }
        if !(epochs > 0.0 && epochs.is_finite()) {
            return Err(DataError::option("epochs", "a finite number above 0", epochs));
        }
        let mut indices: Vec<usize> = (0..difficulty.len()).collect();
        // Adding 0.0 turns -0.0 into 0.0, so that the two count as equal.
        indices.sort_by(|&a, &b| (difficulty[a] + 0.0).total_cmp(&(difficulty[b] + 0.0)));
        Ok(Self { num_samples: indices.len(), indices, epochs, seed, pacing: Box::new(pacing) })
    }

    /// How many draws an epoch has, the number of samples unless set.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for 0, or when there is no sample to draw.
    pub fn num_samples(mut self, num_samples: usize) -> Result<Self, DataError> {
        if num_samples == 0 || self.indices.is_empty() {
            let expected = if num_samples == 0 { "at least 1" } else { "0, since there is nothing to draw from" };
            return Err(DataError::option("num_samples", expected, num_samples));
        }
        self.num_samples = num_samples;
        Ok(self)
    }

    /// How many samples are visible at a draw.
    fn visible(&self, epoch: u64, draw: usize) -> usize {
        let progress = (epoch as f64 + draw as f64 / self.num_samples as f64) / self.epochs;
        let share = (self.pacing)(progress.min(1.0));
        // A NaN share becomes 0 in the cast.
        ((share.clamp(0.0, 1.0) * self.indices.len() as f64).ceil() as usize).max(1)
    }
}

impl Sampler for Curriculum {
    fn len(&self) -> usize {
        self.num_samples
    }

    fn order(&self, epoch: u64) -> Vec<usize> {
        let mut bits = Philox::new(self.seed, epoch).bits();
        let mut order = Vec::with_capacity(self.num_samples);
        // The visible samples; those from `seen` on have not been drawn in this round.
        let (mut pool, mut seen) = (Vec::new(), 0);
        for draw in 0..self.num_samples {
            let visible = self.visible(epoch, draw).max(pool.len());
            pool.extend_from_slice(&self.indices[pool.len()..visible]);
            if seen == pool.len() {
                seen = 0;
            }
            let (turn, _) = below(bits.draw(), pool.len() - seen);
            pool.swap(seen, seen + turn);
            order.push(pool[seen]);
            seen += 1;
        }
        order
    }
}

impl fmt::Debug for Curriculum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Curriculum")
            .field("len", &self.indices.len())
            .field("epochs", &self.epochs)
            .field("seed", &self.seed)
            .field("num_samples", &self.num_samples)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pacing;

    /// Scores that put index 999 first and 0 last.
    fn scores() -> Vec<f64> {
        (0..1000).map(|i| -f64::from(i)).collect()
    }

    #[test]
    fn draws_stay_within_the_visible_share_and_cover_it() -> Result<(), DataError> {
        let curriculum = Curriculum::new(&scores(), 4.0, 1, pacing::linear(0.1)?)?;
        for epoch in 0..6 {
            let order = curriculum.order(epoch);
            for (draw, index) in order.iter().enumerate() {
                let progress = ((epoch as f64 + draw as f64 / 1000.0) / 4.0).min(1.0);
                assert!(((999 - index) as f64) < 1000.0 * (0.1 + 0.9 * progress) + 1e-6, "epoch {epoch}, draw {draw}");
            }
            assert_eq!(order, curriculum.order(epoch));
        }
        let mut all = curriculum.order(4);
        assert!(all[..100].iter().any(|&index| index < 500), "{:?}", &all[..100]);
        all.sort_unstable();
        assert_eq!(all, (0..1000).collect::<Vec<_>>());
        Ok(())
    }

    #[test]
    fn samples_are_drawn_in_rounds_of_all_visible_ones() -> Result<(), DataError> {
        let curriculum = Curriculum::new(&scores(), 1.0, 7, |_| 0.05)?.num_samples(120)?;
        let order = curriculum.order(0);
        for round in order.chunks_exact(50) {
            let mut round = round.to_vec();
            round.sort_unstable();
            assert_eq!(round, (950..1000).collect::<Vec<_>>());
        }
        assert_ne!(order[..50], order[50..100]);
        assert_ne!(order, curriculum.order(1));
        Ok(())
    }

    #[test]
    fn draws_among_visible_samples_are_uniform() -> Result<(), DataError> {
        let curriculum = Curriculum::new(&[3.0, 1.0, 2.0, 0.0, 9.0], 1.0, 2, |_| 0.8)?.num_samples(2)?;
        let mut counts = [0u32; 5];
        for epoch in 0..20_000 {
            counts[curriculum.order(epoch)[1]] += 1;
        }
        // Five standard deviations of a binomial count with p = 1/4.
        assert!(counts[..4].iter().all(|count| count.abs_diff(5000) < 307), "{counts:?}");
        assert_eq!(counts[4], 0);
        Ok(())
    }

    #[test]
    fn odd_pacing_and_bad_options() -> Result<(), DataError> {
        for share in [f64::NAN, -1.0, 0.0] {
            let first = Curriculum::new(&[2.0, 1.0, 3.0], 1.0, 0, move |_| share)?;
            assert_eq!(first.order(0), [1, 1, 1]);
        }
        let shrinking = Curriculum::new(&scores(), 1.0, 0, |progress| 7.0 - 9.0 * progress)?;
        assert_eq!(shrinking.order(0).len(), 1000);
        assert!(Curriculum::new(&[], 1.0, 0, |_| 1.0)?.order(0).is_empty());
        let error = Curriculum::new(&[1.0, f64::NAN], 1.0, 0, |_| 1.0).unwrap_err();
        assert_eq!(error.to_string(), "difficulty: expected numbers, found NaN at index 1");
        assert!(Curriculum::new(&[1.0], 0.0, 0, |_| 1.0).is_err());
        assert!(Curriculum::new(&[1.0], 1.0, 0, |_| 1.0)?.num_samples(0).is_err());
        assert!(Curriculum::new(&[], 1.0, 0, |_| 1.0)?.num_samples(3).is_err());
        Ok(())
    }
}
