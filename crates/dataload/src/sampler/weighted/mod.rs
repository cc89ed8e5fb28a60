//! Random orders with a probability for each sample.

mod alias;

use alias::AliasTable;

use crate::rng::unit;
use crate::{DataError, Generator, Philox, Sampler};

/// Random samples, each with a probability proportional to its weight.
///
/// With replacement, the default, every draw takes constant time, by an alias table that is made once.
///
/// Without replacement, draws are successive: each takes one of the remaining samples, in proportion to their weights.
/// This equals sorting exponentially distributed times whose rates are the weights: the smallest time falls on each
/// sample with exactly these probabilities, and since the distribution is memoryless, so does the next one among the
/// rest. So every index gets a time `-ln(uniform) / weight`, and the samples are taken in order of their times.
///
/// # Source
/// `torch.utils.data.WeightedRandomSampler`, without the limit of 2^24 weights that its `torch.multinomial` has;
/// Efraimidis and Spirakis, "Weighted Random Sampling with a Reservoir" (2006).
#[derive(Clone, Debug)]
pub struct WeightedRandomSampler {
    weights: Vec<f64>,
    num_samples: usize,
    seed: u64,
    /// `Some` with replacement.
    table: Option<AliasTable>,
}

impl WeightedRandomSampler {
    /// `num_samples` draws per epoch by `weights`, which need not add up to 1.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a weight that is negative or not finite, when none is above 0, and for 0 draws.
    pub fn new(weights: impl Into<Vec<f64>>, num_samples: usize, seed: u64) -> Result<Self, DataError> {
        let weights = weights.into();
        if let Some(index) = weights.iter().position(|weight| !(weight.is_finite() && *weight >= 0.0)) {
            let found = format!("{} at index {index}", weights[index]);
            return Err(DataError::option("weights", "finite numbers of at least 0", found));
        }
        if weights.iter().all(|&weight| weight == 0.0) {
            return Err(DataError::option("weights", "at least one above 0", format!("none of {}", weights.len())));
        }
        DataError::at_least_1("num_samples", num_samples)?;
        let table = Some(AliasTable::new(&weights));
        Ok(Self { weights, num_samples, seed, table })
    }

    /// Whether an index may be drawn more than once in an epoch; on unless set, as in PyTorch.
    ///
    /// Without replacement, too few weights above 0 are an error here; PyTorch's CPU version then draws indices of
    /// weight 0.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] when, without replacement, there are fewer weights above 0 than draws.
    pub fn replacement(mut self, replacement: bool) -> Result<Self, DataError> {
        let possible = self.weights.iter().filter(|&&weight| weight > 0.0).count();
        if !replacement && possible < self.num_samples {
            let expected = format!("at most {possible} without replacement, the number of weights above 0");
            return Err(DataError::option("num_samples", expected, self.num_samples));
        }
        self.table = replacement.then(|| AliasTable::new(&self.weights));
        Ok(self)
    }

    fn successive(&self, philox: Philox) -> Vec<usize> {
        let mut bits = philox.bits();
        // Every index draws a time, even at weight 0, so that setting one weight to 0 does not change the others'
        // times.
        let clock = |(index, &weight): (usize, &f64)| ((-(1.0 - unit(bits.draw())).ln()) / weight, index);
        let mut clocks: Vec<(f64, usize)> = self.weights.iter().enumerate().map(clock).collect();
        // Removes weights of 0, whose time may be NaN (0 / 0).
        clocks.retain(|&(_, index)| self.weights[index] > 0.0);
        let earlier = |a: &(f64, usize), b: &(f64, usize)| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1));
        if self.num_samples < clocks.len() {
            clocks.select_nth_unstable_by(self.num_samples, earlier);
            clocks.truncate(self.num_samples);
        }
        clocks.sort_unstable_by(earlier);
        clocks.into_iter().map(|(_, index)| index).collect()
    }
}

impl Sampler for WeightedRandomSampler {
    fn len(&self) -> usize {
        self.num_samples
    }

    fn order(&self, epoch: u64) -> Vec<usize> {
        let philox = Philox::new(self.seed, epoch);
        match &self.table {
            Some(table) => {
                let mut bits = philox.bits();
                (0..self.num_samples).map(|_| table.at(bits.draw())).collect()
            }
            None => self.successive(philox),
        }
    }

    fn order_from(&self, _epoch: u64, generator: &mut Generator) -> Result<Vec<usize>, DataError> {
        generator.multinomial(&self.weights, self.num_samples, self.table.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn with_replacement_draws_follow_the_weights() -> Result<(), DataError> {
        let weights = [0.1, 0.0, 3.0, 1.0, 0.4, 0.0, 5.5];
        let sampler = WeightedRandomSampler::new(weights, 100_000, 2)?;
        let mut counts = [0u32; 7];
        sampler.order(0).into_iter().for_each(|index| counts[index] += 1);
        assert_eq!((counts[1], counts[5]), (0, 0));
        let expected = weights.map(|weight| 100_000.0 * weight / 10.0);
        let cells = counts.iter().zip(expected).filter(|(_, expected)| *expected > 0.0);
        let statistic: f64 = cells.map(|(&count, mean)| (f64::from(count) - mean).powi(2) / mean).sum();
        // 4 degrees of freedom: 99.99 % of random tables are below 23.5.
        assert!(statistic < 23.5, "{statistic}: {counts:?}");
        assert_ne!(sampler.order(0), sampler.order(1));
        Ok(())
    }

    #[test]
    fn without_replacement_draws_are_successive() -> Result<(), DataError> {
        let weights = [1.0, 2.0, 0.0, 3.0, 4.0];
        let sampler = WeightedRandomSampler::new(weights, 2, 8)?.replacement(false)?;
        let (mut counts, epochs) = ([[0u32; 5]; 5], 50_000);
        for epoch in 0..epochs {
            let order = sampler.order(epoch);
            counts[order[0]][order[1]] += 1;
        }
        for first in 0..5 {
            for second in 0..5 {
                let pair = weights[first] / 10.0 * weights[second] / (10.0 - weights[first]);
                let mean = if first == second { 0.0 } else { epochs as f64 * pair };
                // Five standard deviations of a binomial count.
                let slack = 5.0 * mean.sqrt();
                assert!((f64::from(counts[first][second]) - mean).abs() <= slack, "{first}, {second}: {counts:?}");
            }
        }
        Ok(())
    }

    #[test]
    fn without_replacement_every_nonzero_weight_is_drawn() -> Result<(), DataError> {
        let weights = [f64::MIN_POSITIVE, 0.0, 1e300, 2.0, 0.0, 1.0];
        let mut order = WeightedRandomSampler::new(weights, 4, 0)?.replacement(false)?.order(3);
        order.sort_unstable();
        assert_eq!(order, [0, 2, 3, 5]);
        let again = WeightedRandomSampler::new(weights, 9, 0)?.replacement(true)?;
        assert!(again.order(0).iter().all(|&index| index == 2));
        Ok(())
    }

    #[test]
    fn unusable_weights_are_refused() {
        let message =
            |weights: &[f64], samples| WeightedRandomSampler::new(weights, samples, 0).unwrap_err().to_string();
        assert_eq!(message(&[1.0, -0.5], 1), "weights: expected finite numbers of at least 0, found -0.5 at index 1");
        assert_eq!(message(&[f64::NAN], 1), "weights: expected finite numbers of at least 0, found NaN at index 0");
        assert!(message(&[1.0, f64::INFINITY], 1).contains("inf at index 1"));
        assert_eq!(message(&[0.0, 0.0], 1), "weights: expected at least one above 0, found none of 2");
        assert_eq!(message(&[], 1), "weights: expected at least one above 0, found none of 0");
        assert_eq!(message(&[1.0], 0), "num_samples: expected at least 1, found 0");
        let sampler = WeightedRandomSampler::new([1.0, 0.0, 2.0], 3, 0).unwrap();
        let expected = "num_samples: expected at most 2 without replacement, the number of weights above 0, found 3";
        assert_eq!(sampler.replacement(false).unwrap_err().to_string(), expected);
    }
}
