//! Random permutations.

use crate::rng::below;

/// Below this many positions, one draw serves two of them: the bias stays below `2^42 / 2^64`, one in four million.
const PAIRED: usize = 1 << 21;

/// Moves `count` random items (at most all), in random order, to the end of `items`. Each call of `draw` gives 64
/// random bits.
///
/// A Fisher-Yates shuffle from the last position down: the last of the remaining `rest` positions is swapped with
/// position `floor(bits * rest / 2^64)`. Once fewer than [`PAIRED`] positions remain, the remainder of that product
/// (`bits * rest mod 2^64`) serves as the bits of the next swap, so only every other swap needs a draw.
pub(crate) fn choose<T>(items: &mut [T], count: usize, mut draw: impl FnMut() -> u64) {
    let done = items.len().saturating_sub(count).max(1);
    let mut rest = items.len();
    while rest > done {
        let (other, left) = below(draw(), rest);
        rest -= 1;
        items.swap(rest, other);
        if rest > done && rest < PAIRED {
            let (other, _) = below(left, rest);
            rest -= 1;
            items.swap(rest, other);
        }
    }
}

/// Shuffles all of `items`, see [`choose`].
pub(crate) fn shuffle<T>(items: &mut [T], draw: impl FnMut() -> u64) {
    choose(items, items.len(), draw);
}

/// `count` numbers below `len`: whole random permutations one after the other, the last one cut short.
pub(crate) fn permutations(len: usize, count: usize, mut draw: impl FnMut() -> u64) -> Vec<usize> {
    let mut order = Vec::with_capacity(count.max(len));
    while order.len() < count && len > 0 {
        let (start, wanted) = (order.len(), len.min(count - order.len()));
        order.extend(0..len);
        choose(&mut order[start..], wanted, &mut draw);
        order.drain(start..start + len - wanted);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Draws, Philox};

    /// How often each pair that `pair` returns was seen, for numbers below `n`.
    fn table(n: usize, rounds: u64, pair: impl Fn(u64) -> Vec<(usize, usize)>) -> Vec<u64> {
        let mut counts = vec![0; n * n];
        (0..rounds).flat_map(pair).for_each(|(a, b)| counts[a * n + b] += 1);
        counts
    }

    fn chi_square(counts: &[u64], expected: f64) -> f64 {
        counts.iter().map(|&count| (count as f64 - expected).powi(2) / expected).sum()
    }

    fn permutation(len: usize, stream: u64) -> Vec<usize> {
        let mut bits = Philox::new(11, stream).bits();
        permutations(len, len, || bits.draw())
    }

    #[test]
    fn all_orders_of_four_are_equally_likely() {
        let mut counts = std::collections::BTreeMap::new();
        (0..24_000).for_each(|stream| *counts.entry(permutation(4, stream)).or_insert(0u64) += 1);
        assert_eq!(counts.len(), 24);
        let counts: Vec<u64> = counts.into_values().collect();
        // 23 degrees of freedom: 99.99 % of random tables are below 56.
        assert!(chi_square(&counts, 1000.0) < 56.0, "{counts:?}");
    }

    #[test]
    fn positions_and_neighbours_are_uniform() {
        let (len, rounds) = (40, 20_000);
        let places = table(len, rounds, |stream| permutation(len, stream).into_iter().enumerate().collect());
        // Each of the 40 * 40 cells adds 1 - 1 / 40 on average: 1560 in total, with a standard deviation of 57; allow
        // five of them.
        let statistic = chi_square(&places, rounds as f64 / len as f64);
        assert!((statistic - 1560.0).abs() < 283.0, "{statistic}");
        let pairs = |stream| permutation(len, stream).windows(2).map(|pair| (pair[0], pair[1])).collect();
        let neighbours: Vec<u64> = table(len, rounds, pairs).into_iter().filter(|&count| count > 0).collect();
        assert_eq!(neighbours.len(), len * (len - 1));
        let statistic = chi_square(&neighbours, rounds as f64 / len as f64);
        assert!((statistic - 1560.0).abs() < 283.0, "{statistic}");
    }

    #[test]
    fn chosen_items_are_uniform_and_distinct() {
        let mut counts = [0u64; 10];
        for sample in 0..10_000 {
            let mut draws = Draws::new(1, 2, sample, 3);
            let chosen = permutations(10, 3, || draws.bits());
            assert!(chosen.len() == 3 && chosen[0] != chosen[1] && chosen[1] != chosen[2] && chosen[0] != chosen[2]);
            chosen.into_iter().for_each(|index| counts[index] += 1);
        }
        // Five standard deviations of a binomial count with p = 0.3.
        assert!(counts.iter().all(|&count| count.abs_diff(3000) < 230), "{counts:?}");
    }

    #[test]
    fn more_draws_than_items_give_whole_permutations_and_a_part() {
        let mut bits = Philox::new(0, 0).bits();
        let order = permutations(7, 17, || bits.draw());
        let sorted = |part: &[usize]| {
            let mut part = part.to_vec();
            part.sort_unstable();
            part
        };
        assert_eq!((sorted(&order[..7]), sorted(&order[7..14])), ((0..7).collect(), (0..7).collect()));
        let mut last = sorted(&order[14..]);
        last.dedup();
        assert_eq!((order.len(), last.len()), (17, 3));
        assert!(permutations(0, 3, || 0).is_empty());
    }

    #[test]
    fn long_orders_are_permutations() {
        let mut order = permutation(PAIRED + 1001, 5);
        // From a separate implementation in Python.
        assert_eq!(order[..4], [543_517, 2_009_051, 1_972_074, 449_150]);
        assert_eq!(order[PAIRED - 2..PAIRED + 2], [666_538, 1_874_427, 85_915, 1_294_440]);
        assert_eq!(order[PAIRED + 999..], [688_466, 710_570]);
        order.sort_unstable();
        assert!(order.into_iter().eq(0..PAIRED + 1001));
    }
}
