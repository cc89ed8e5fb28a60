//! Random orders and draws of the loader itself, each from its own random stream.

use crate::permutation::shuffle;
use crate::{Philox, rng};

/// The purpose of a random number, so that two uses of one seed are independent.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Domain {
    /// The order of a stream's shards.
    Shards = 0x7368_6172,
    /// The order within a window of a stream.
    Window = 0x7769_6e64,
    /// The substitutes of bad samples.
    Substitute = 0x7375_6273,
    /// The numbers of draws, see [`Drawn::draw`](crate::Drawn::draw).
    Draw = 0x6472_6177,
}

/// The key that belongs to `domain` and `coordinates`.
fn key(seed: u64, domain: Domain, coordinates: &[u64]) -> u64 {
    let start = Philox::new(seed, domain as u64).at(0);
    coordinates.iter().fold(start, |key, &coordinate| Philox::new(key, domain as u64).at(coordinate))
}

/// The number of a draw of sample `index`; `at` is its position in the order, or in a stream its pass.
pub(crate) fn draw(index: u64, at: u64) -> u64 {
    key(at, Domain::Draw, &[index])
}

/// A permutation of `0..len` that is a function of the other arguments.
pub(crate) fn permutation(len: usize, seed: u64, domain: Domain, coordinates: &[u64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..len).collect();
    let mut bits = Philox::new(key(seed, domain, coordinates), 0).bits();
    shuffle(&mut order, || bits.draw());
    order
}

/// A number below `end`, which is not 0, that is a function of the arguments.
pub(crate) fn below(end: usize, seed: u64, domain: Domain, coordinates: &[u64]) -> usize {
    rng::below(key(seed, domain, coordinates), end).0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_permutations_and_differ_in_every_coordinate() {
        let order = |seed, coordinates: &[u64]| permutation(50, seed, Domain::Window, coordinates);
        let mut sorted = order(3, &[1, 2]);
        sorted.sort_unstable();
        assert_eq!(sorted, (0..50).collect::<Vec<_>>());
        assert_eq!(order(3, &[1, 2]), order(3, &[1, 2]));
        for other in [order(4, &[1, 2]), order(3, &[2, 1]), order(3, &[1, 3]), order(3, &[1])] {
            assert_ne!(other, order(3, &[1, 2]));
        }
        assert_ne!(permutation(50, 3, Domain::Shards, &[1, 2]), order(3, &[1, 2]));
        assert!((0..1000).all(|i| below(7, 0, Domain::Substitute, &[i]) < 7));
    }
}
