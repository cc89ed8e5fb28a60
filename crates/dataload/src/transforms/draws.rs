//! The random numbers of one sample.

use crate::Philox;
use crate::rng::{below, unit};

/// Separates the random streams of transforms from the orders that a sampler draws from the same seed.
const TRANSFORMS: u64 = 0x7472_616e_7366_6f72;

/// Random numbers that are a function of (seed, epoch, draw) and the position in the chain of transforms.
#[derive(Clone, Debug)]
pub struct Draws {
    philox: Philox,
    next: u64,
}

impl Draws {
    /// The numbers for the transform at `position` of a chain; `draw` is the sample's
    /// [`Drawn::draw`](crate::Drawn::draw), or any other number that identifies the draw.
    pub fn new(seed: u64, epoch: u64, draw: u64, position: u64) -> Self {
        let key = Philox::new(seed ^ TRANSFORMS, epoch).at(draw);
        Self { philox: Philox::new(key, position), next: 0 }
    }

    /// The next 64 random bits.
    pub fn bits(&mut self) -> u64 {
        let bits = self.philox.at(self.next);
        self.next += 1;
        bits
    }

    /// A number from `low` up to, but not including, `high`.
    pub fn uniform(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * unit(self.bits())
    }

    /// An integer below `end`; 0 when `end` is 0.
    pub fn below(&mut self, end: usize) -> usize {
        below(self.bits(), end).0
    }

    /// True with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        self.uniform(0.0, 1.0) < probability
    }

    /// A number from the standard normal distribution.
    pub(crate) fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform(0.0, 1.0)).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform(0.0, 1.0)).cos()
    }

    /// The logarithm of a gamma-distributed number of this shape (the number itself would underflow for small shapes).
    ///
    /// # Source
    /// Marsaglia and Tsang, "A Simple Method for Generating Gamma Variables" (2000).
    fn ln_gamma(&mut self, shape: f64) -> f64 {
        if shape < 1.0 {
            let unit = 1.0 - self.uniform(0.0, 1.0);
            return self.ln_gamma(shape + 1.0) + unit.ln() / shape;
        }
        let d = shape - 1.0 / 3.0;
        let c = 1.0 / (9.0 * d).sqrt();
        loop {
            let normal = self.normal();
            let v = (1.0 + c * normal).powi(3);
            let unit = 1.0 - self.uniform(0.0, 1.0);
            if v > 0.0 && unit.ln() < 0.5 * normal * normal + d - d * v + d * v.ln() {
                return d.ln() + v.ln();
            }
        }
    }

    /// Numbers from the symmetric Dirichlet distribution, 1 in total.
    pub(crate) fn dirichlet(&mut self, alpha: f64, count: usize) -> Vec<f64> {
        let logarithms: Vec<f64> = (0..count).map(|_| self.ln_gamma(alpha)).collect();
        let most = logarithms.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = logarithms.iter().map(|logarithm| (logarithm - most).exp()).sum();
        logarithms.into_iter().map(|logarithm| (logarithm - most).exp() / total).collect()
    }

    /// A number from the symmetric beta distribution, 0 to 1.
    pub(crate) fn beta(&mut self, alpha: f64) -> f64 {
        let (one, other) = (self.ln_gamma(alpha), self.ln_gamma(alpha));
        1.0 / (1.0 + (other - one).exp())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_depend_only_on_their_position_and_are_uniform() {
        let all = |seed, epoch, sample, position| {
            let mut draws = Draws::new(seed, epoch, sample, position);
            (0..3).map(|_| draws.bits()).collect::<Vec<_>>()
        };
        assert_eq!(all(1, 2, 3, 4), all(1, 2, 3, 4));
        for other in [all(0, 2, 3, 4), all(1, 0, 3, 4), all(1, 2, 0, 4), all(1, 2, 3, 0)] {
            assert_ne!(other, all(1, 2, 3, 4));
        }
        let mut draws = Draws::new(0, 0, 0, 0);
        let counts = (0..6000).fold([0; 6], |mut counts, _| {
            counts[draws.below(6)] += 1;
            counts
        });
        assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
        assert_eq!(draws.below(0), 0);
    }

    #[test]
    fn beta_has_its_moments() {
        for alpha in [0.1, 0.5, 1.0, 4.0] {
            let mut draws = Draws::new(5, 0, 0, 0);
            let values: Vec<f64> = (0..20_000).map(|_| draws.beta(alpha)).collect();
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            // Each number of a Dirichlet distribution has a beta distribution, with 2 alpha for the rest of 3.
            let parts = draws.dirichlet(alpha, 3);
            assert!((parts.iter().sum::<f64>() - 1.0).abs() < 1e-12, "{parts:?}");
            let first = (0..20_000).map(|_| draws.dirichlet(alpha, 3)[0]).sum::<f64>() / 20_000.0;
            assert!((first - 1.0 / 3.0).abs() < 0.015, "{alpha}: {first}");
            let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / values.len() as f64;
            assert!((mean - 0.5).abs() < 0.015, "{alpha}: {mean}");
            assert!((variance - 0.25 / (2.0 * alpha + 1.0)).abs() < 0.01, "{alpha}: {variance}");
        }
    }
}
