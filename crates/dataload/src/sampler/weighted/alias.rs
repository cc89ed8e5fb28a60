//! Weighted draws in constant time.

use crate::rng::below;

/// One of the equally likely columns, one per weight: it gives its own index or one other.
#[derive(Clone, Copy, Debug)]
struct Column {
    /// The probability of its own index, in units of 2^-64.
    own: u64,
    other: usize,
}

/// A table from which an index is drawn with probability proportional to its weight.
///
/// # Source
/// Walker (1977); Vose, "A Linear Algorithm for Generating Random Numbers with a Given Distribution" (1991).
#[derive(Clone, Debug)]
pub(super) struct AliasTable {
    columns: Vec<Column>,
}

impl AliasTable {
    /// A table of finite weights of at least 0, at least one of them above 0.
    pub(super) fn new(weights: &[f64]) -> Self {
        let heaviest = (0..weights.len()).max_by(|&a, &b| weights[a].total_cmp(&weights[b])).unwrap_or(0);
        // Scaled by the heaviest first, since a sum of huge weights may overflow.
        let scaled = |index: usize| weights[index] / weights[heaviest];
        let mean = (0..weights.len()).map(scaled).sum::<f64>() / weights.len() as f64;
        let mut heights: Vec<f64> = (0..weights.len()).map(|index| scaled(index) / mean).collect();
        let mut columns = vec![Column { own: u64::MAX, other: heaviest }; weights.len()];
        let (mut low, mut high): (Vec<usize>, Vec<usize>) = (0..weights.len()).partition(|&index| heights[index] < 1.0);
        while let (Some(&index), Some(&donor)) = (low.last(), high.last()) {
            low.pop();
            columns[index] = Column { own: (heights[index] * 2f64.powi(64)) as u64, other: donor };
            heights[donor] -= 1.0 - heights[index];
            if heights[donor] < 1.0 {
                low.extend(high.pop());
            }
        }
        // The remaining columns are full except for rounding: they always give their own index, but never one of weight
        // 0.
        for index in low.into_iter().chain(high) {
            let own = if weights[index] > 0.0 { u64::MAX } else { 0 };
            columns[index] = Column { own, other: if weights[index] > 0.0 { index } else { heaviest } };
        }
        Self { columns }
    }

    /// The index that 64 random bits select.
    pub(super) fn at(&self, bits: u64) -> usize {
        let (index, coin) = below(bits, self.columns.len());
        let Column { own, other } = self.columns[index];
        if coin < own { index } else { other }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The probability of each index, added up from the columns.
    fn shares(weights: &[f64]) -> Vec<f64> {
        let table = AliasTable::new(weights);
        let mut shares = vec![0.0; weights.len()];
        for (index, column) in table.columns.iter().enumerate() {
            let own = column.own as f64 / 2f64.powi(64);
            shares[index] += own / weights.len() as f64;
            shares[column.other] += (1.0 - own) / weights.len() as f64;
        }
        shares
    }

    #[test]
    fn columns_add_up_to_the_weights() {
        let skewed: Vec<f64> = (0..1000).map(|i| f64::from(i % 7) * 1.1f64.powi(i % 90)).collect();
        let huge = vec![f64::MAX, f64::MAX / 2.0, 0.0, f64::MAX];
        let tiny = vec![f64::MIN_POSITIVE / 8.0, 0.0, f64::MIN_POSITIVE / 4.0];
        for weights in [vec![3.0], vec![1.0, 1.0], vec![0.1, 0.2, 0.7, 0.0], skewed, huge, tiny] {
            let sum: f64 = weights.iter().map(|weight| weight / 1024.0).sum();
            for (share, weight) in shares(&weights).into_iter().zip(&weights) {
                assert!((share - weight / 1024.0 / sum).abs() < 1e-12, "{share} for {weight}");
                assert_eq!(share == 0.0, *weight == 0.0);
            }
        }
    }
}
