//! Which rank owns which parameter.

/// The owner of each parameter: within each group the largest first, each goes to the rank that has the fewest elements
/// so far. `sizes`: elements of each parameter by group.
///
/// # Source
/// `ZeroRedundancyOptimizer._partition_parameters`
pub(crate) fn owners(sizes: &[Vec<usize>], ranks: usize) -> Vec<Vec<usize>> {
    let mut load = vec![0usize; ranks];
    let mut owners = Vec::with_capacity(sizes.len());
    for group in sizes {
        let mut largest_first: Vec<usize> = (0..group.len()).collect();
        // Stable: of equal sizes, the first comes first.
        largest_first.sort_by_key(|&index| std::cmp::Reverse(group[index]));
        let mut of_group = vec![0; group.len()];
        for index in largest_first {
            // Of equal loads, the first rank: `min_by_key` returns the first minimum.
            let rank = (0..ranks).min_by_key(|&rank| load[rank]).unwrap_or(0);
            of_group[index] = rank;
            load[rank] = load[rank].saturating_add(group[index]);
        }
        owners.push(of_group);
    }
    owners
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_parameters_are_given_out_first() {
        assert_eq!(owners(&[vec![1, 5, 3, 4]], 2), [vec![0, 0, 1, 1]], "5 | 4, 3 | 4, 3 and 1 to the smaller");
        assert_eq!(owners(&[vec![2, 2, 2]], 2), [vec![0, 1, 0]]);
    }

    #[test]
    fn loads_go_on_from_group_to_group() {
        assert_eq!(owners(&[vec![10], vec![4, 4, 3]], 2), [vec![0], vec![1, 1, 1]]);
    }

    #[test]
    fn more_ranks_than_parameters_leave_some_without() {
        assert_eq!(owners(&[vec![7, 9]], 4), [vec![1, 0]]);
        assert_eq!(owners(&[vec![]], 1), [Vec::<usize>::new()]);
    }
}
