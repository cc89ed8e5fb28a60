//! The knapsack problem.

/// Room is counted in at most so many parts.
const PARTS: usize = 4096;
/// The table has at most so many places.
const PLACES: usize = 1 << 26;

/// The items, each of a size and a value, that are worth the most together and fit into the room. Sizes are rounded up to
/// parts of the room, a 4096th or more; what that leaves free is filled by the items that are worth the most for their size.
pub(super) fn most_valuable(items: &[(usize, u64)], room: usize) -> Vec<usize> {
    let parts = PARTS.min(PLACES / items.len().max(1)).max(1);
    let mut left = room;
    let part = room.div_ceil(parts).max(1);
    let room = room / part;
    let sizes: Vec<_> = items.iter().map(|(size, _)| size.div_ceil(part)).collect();
    // The most that the items so far are worth in so many parts, and which items that takes.
    let mut worth = vec![0; room + 1];
    let mut takes = vec![vec![false; room + 1]; items.len()];
    for (item, &(_, value)) in items.iter().enumerate() {
        for parts in (sizes[item]..=room).rev() {
            let with_it = worth[parts - sizes[item]] + value;
            if with_it > worth[parts] {
                worth[parts] = with_it;
                takes[item][parts] = true;
            }
        }
    }
    let mut parts = room;
    let mut taken = Vec::new();
    for item in (0..items.len()).rev() {
        if takes[item][parts] {
            taken.push(item);
            parts -= sizes[item];
            left -= items[item].0;
        }
    }
    let mut others: Vec<usize> = (0..items.len()).collect();
    taken.iter().for_each(|&item| others[item] = usize::MAX);
    others.retain(|&item| item != usize::MAX);
    let worth_for_size = |item: usize| items[item].1 as f64 / items[item].0.max(1) as f64;
    others.sort_by(|&one, &other| worth_for_size(other).total_cmp(&worth_for_size(one)));
    for item in others {
        if items[item].0 <= left {
            taken.push(item);
            left -= items[item].0;
        }
    }
    taken.sort_unstable();
    taken
}

#[cfg(test)]
mod tests {
    use super::most_valuable;

    /// Tries every choice.
    fn best(items: &[(usize, u64)], room: usize) -> u64 {
        let chosen = |choice: u32| items.iter().enumerate().filter(move |(item, _)| choice >> item & 1 == 1);
        let fitting = (0..1 << items.len()).filter(|&choice| chosen(choice).map(|it| it.1.0).sum::<usize>() <= room);
        fitting.map(|choice| chosen(choice).map(|it| it.1.1).sum()).max().unwrap()
    }

    #[test]
    fn the_best_choice_is_found() {
        let mut state = 7_u64;
        let mut draw = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        for _ in 0..200 {
            let items: Vec<_> = (0..10).map(|_| (draw(50) as usize, draw(100))).collect();
            let room = draw(200) as usize;
            let taken = most_valuable(&items, room);
            assert!(taken.iter().map(|&item| items[item].0).sum::<usize>() <= room);
            assert_eq!(taken.iter().map(|&item| items[item].1).sum::<u64>(), best(&items, room), "{items:?} in {room}");
        }
    }

    #[test]
    fn large_rooms_and_many_items_use_the_room() {
        let items = vec![(1 << 20, 1); 100];
        assert_eq!(most_valuable(&items, 60 << 20).len(), 60);
        // More items than parts.
        assert_eq!(most_valuable(&vec![(1000, 1); 20_000], 10_000_000).len(), 10_000);
        assert!(most_valuable(&items, 0).is_empty() && most_valuable(&[], 10).is_empty());
    }
}
