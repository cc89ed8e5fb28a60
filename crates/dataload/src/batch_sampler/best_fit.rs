//! Best-fit packing of sequences into packs of a fixed capacity.

use std::collections::BTreeMap;

use crate::DataError;

/// Groups sequences into packs of at most `capacity` tokens, by best-fit decreasing.
///
/// Each pack is a list of positions in `lengths`. Sequences are placed in order of length, the longest first; each goes
/// into the pack with the least room that still fits it, or into a new one. This needs at most 11/9 of the fewest
/// possible packs plus one; for texts, whose lengths vary widely, packs are nearly full. It takes `O(n log n)`.
///
/// ```
/// let packs = overdrive_dataload::pack(&[3, 5, 6, 2, 4], 10)?;
/// assert_eq!(packs, [vec![2, 4], vec![1, 0, 3]]);
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// # Errors
/// [`DataError::InvalidOption`] for a sequence that is longer than `capacity`.
///
/// # Source
/// Ding et al., "Fewer Truncations Improve Language Modeling" (2024).
pub fn pack(lengths: &[usize], capacity: usize) -> Result<Vec<Vec<usize>>, DataError> {
    fits(lengths, capacity)?;
    let by_length = longest_first(lengths);
    let sorted: Vec<usize> = by_length.iter().map(|&index| lengths[index]).collect();
    let packs = best_fit(&sorted, capacity, usize::MAX);
    Ok(packs.into_iter().map(|pack| pack.into_iter().map(|place| by_length[place]).collect()).collect())
}

pub(super) fn fits(lengths: &[usize], capacity: usize) -> Result<(), DataError> {
    match lengths.iter().position(|&length| length > capacity) {
        None => Ok(()),
        Some(index) => {
            let expected = format!("at least every sequence's length, {} tokens at index {index}", lengths[index]);
            Err(DataError::option("capacity", expected, capacity))
        }
    }
}

/// The positions in `lengths`, by falling length; equal lengths keep their order.
pub(super) fn longest_first(lengths: &[usize]) -> Vec<usize> {
    let mut by_length: Vec<usize> = (0..lengths.len()).collect();
    by_length.sort_by_key(|&index| std::cmp::Reverse(lengths[index]));
    by_length
}

/// Packs of at most `most` sequences, as positions in `sorted`, which holds falling lengths of at most `capacity`.
pub(super) fn best_fit(sorted: &[usize], capacity: usize, most: usize) -> Vec<Vec<usize>> {
    let mut packs: Vec<Vec<usize>> = Vec::new();
    // The packs that may take more sequences, by the room left in them.
    let mut open: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (place, &length) in sorted.iter().enumerate() {
        let best =
            open.range_mut(length..).next().and_then(|(&room, numbers)| Some((room, numbers.pop()?, numbers.len())));
        let (room, number) = match best {
            Some((room, number, left)) => {
                if left == 0 {
                    open.remove(&room);
                }
                (room, number)
            }
            None => {
                packs.push(Vec::new());
                (capacity, packs.len() - 1)
            }
        };
        packs[number].push(place);
        if packs[number].len() < most {
            open.entry(room - length).or_default().push(number);
        }
    }
    packs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Draws;

    /// The room that best fit leaves in each pack, found naively by looking at every pack.
    fn naive(lengths: &[usize], capacity: usize) -> Vec<usize> {
        let mut rooms: Vec<usize> = Vec::new();
        let mut sorted = lengths.to_vec();
        sorted.sort_unstable_by(|a, b| b.cmp(a));
        for length in sorted {
            match rooms.iter_mut().filter(|room| **room >= length).min() {
                Some(best) => *best -= length,
                None => rooms.push(capacity - length),
            }
        }
        rooms.sort_unstable();
        rooms
    }

    #[test]
    fn packs_are_those_of_the_definition() {
        for round in 0..60 {
            let mut draws = Draws::new(3, 1, round, 0);
            let capacity = 1 + draws.below(60);
            let lengths: Vec<usize> = (0..draws.below(300)).map(|_| draws.below(capacity + 1)).collect();
            let packs = pack(&lengths, capacity).unwrap();
            let tokens = |pack: &Vec<usize>| pack.iter().map(|&index| lengths[index]).sum::<usize>();
            let mut rooms: Vec<usize> = packs.iter().map(|pack| capacity - tokens(pack)).collect();
            rooms.sort_unstable();
            assert_eq!(rooms, naive(&lengths, capacity), "round {round}");
            let mut all = packs.concat();
            all.sort_unstable();
            assert_eq!(all, (0..lengths.len()).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_pack_takes_only_so_many_sequences() {
        let sorted = [5, 4, 2, 2, 1, 1, 1, 0, 0];
        let packs = best_fit(&sorted, 10, 3);
        assert!(packs.iter().all(|pack| pack.len() <= 3), "{packs:?}");
        assert_eq!(packs.concat().len(), sorted.len());
        assert_eq!(best_fit(&sorted, 10, 1).len(), sorted.len());
    }

    #[test]
    fn a_sequence_longer_than_a_pack_is_named() {
        let error = pack(&[3, 11, 12], 10).unwrap_err();
        let expected = "at least every sequence's length, 11 tokens at index 1";
        assert_eq!(error.to_string(), format!("capacity: expected {expected}, found 10"));
        assert!(pack(&[], 0).is_ok_and(|packs| packs.is_empty()));
        assert!(pack(&[0, 0], 0).is_ok_and(|packs| packs == [[0, 1]]));
    }
}
