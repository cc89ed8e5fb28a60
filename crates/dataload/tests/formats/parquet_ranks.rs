//! Batches of Parquet rows that another number of ranks goes on with.

use overdrive_core::{Entry, StateDict, StateError, Stateful};
use overdrive_dataload::{DataError, DataLoader, OnError, ParquetDataset, Table};

use crate::fixture;
use crate::parquet::open;
use crate::table::{floats, number};

const ROWS: usize = 60;

type Loader = DataLoader<Table>;

/// The loaders of all ranks, with batches of two of the 60 rows. The ranks have 30, 15, 10 or 8 of them each.
fn ranks(world_size: usize, drop_last: bool) -> Result<Vec<Loader>, DataError> {
    let rank = |rank| {
        let batches = open("part-{0..2}").batches(2)?.window(2).shuffle(true).seed(8).drop_last(drop_last);
        batches.rank(rank, world_size)?.loader().num_workers(rank % 3).build()
    };
    (0..world_size).map(rank).collect()
}

fn rows(table: &Table) -> Vec<i64> {
    floats(table.tensor("int64").unwrap()).iter().map(|&number| number as i64).collect()
}

/// The next batches of each rank, and the state after them, which is the same on all.
fn steps(ranks: &[Loader], count: usize) -> (Vec<Vec<Vec<i64>>>, StateDict) {
    let take = |rank: &Loader| rank.iter().take(count).map(|batch| rows(&batch.unwrap())).collect();
    let batches = ranks.iter().map(take).collect();
    let states: Vec<StateDict> = ranks.iter().map(|rank| rank.state_dict().unwrap()).collect();
    (batches, DataLoader::merge_states(&states).unwrap())
}

fn resumed(world_size: usize, drop_last: bool, state: &StateDict) -> Result<Vec<Loader>, DataError> {
    let mut ranks = ranks(world_size, drop_last)?;
    ranks.iter_mut().for_each(|rank| rank.load_state_dict(state).unwrap());
    Ok(ranks)
}

/// The rows that these parts of an epoch have more often than once, and those that are missing.
fn repeated_and_missing(parts: &[Vec<Vec<Vec<i64>>>]) -> (usize, usize) {
    let mut all: Vec<i64> = parts.iter().flatten().flatten().flatten().copied().collect();
    let had = all.len();
    all.sort_unstable();
    all.dedup();
    assert!(all.iter().all(|found| (0..ROWS).any(|row| number(row) as i64 == *found)));
    (had - all.len(), ROWS - all.len())
}

#[test]
fn any_number_of_ranks_goes_on_without_a_row_lost_or_read_twice() -> Result<(), DataError> {
    for (before, after) in (1..=4).flat_map(|before| (1..=4).map(move |after| (before, after))) {
        for drop_last in [false, true] {
            let whole = ranks(before, drop_last)?[0].len().unwrap();
            let cut_off = repeated_and_missing(&[steps(&ranks(before, drop_last)?, whole).0]);
            assert_eq!(cut_off, (0, if drop_last && before == 4 { 4 } else { 0 }));
            for given in (0..whole).step_by(4).chain([whole]) {
                let (first, state) = steps(&ranks(before, drop_last)?, given);
                let second = resumed(after, drop_last, &state)?;
                let (rest, state) = steps(&second, usize::MAX);
                let name = format!("{before} ranks for {given} batches, then {after}; drop_last: {drop_last}");
                assert!(rest.iter().all(|batches| batches.len() == rest[0].len()), "{name}");
                // At the end some batches come again, or are left out, where the ranks would have unequally many.
                let (repeated, missing) = repeated_and_missing(&[first, rest]);
                let spare = |drop| if drop == drop_last && given > 0 { 2 * (after - 1) } else { 0 };
                let cut_off = if given > 0 { cut_off.1 } else { ROWS - ROWS / after / 2 * 2 * after };
                let cut_off = if drop_last { cut_off } else { 0 };
                assert!(repeated <= spare(false) && missing <= cut_off + spare(true), "{name}: {repeated}, {missing}");
                // The next epoch is that of as many ranks.
                let mut fresh = ranks(after, drop_last)?;
                fresh.iter_mut().for_each(|rank| rank.set_epoch(1));
                assert_eq!(steps(&resumed(after, drop_last, &state)?, 3).0, steps(&fresh, 3).0, "{name}");
            }
        }
    }
    Ok(())
}

#[test]
fn the_rest_of_an_epoch_resumes_at_every_batch_and_with_other_ranks_again() -> Result<(), DataError> {
    let (first, state) = steps(&ranks(2, false)?, 4);
    let (expected, _) = steps(&resumed(3, false, &state)?, usize::MAX);
    // 11 batches of each of two ranks are left: 8 for each of three, the first of them twice, and again for the last.
    assert_eq!([expected[0].len(), expected[1].len(), expected[2].len()], [8; 3]);
    assert_eq!(expected[2][6..], expected[0][..2]);
    for given in 0..=8 {
        let three = resumed(3, false, &state)?;
        let (mut seen, again) = steps(&three, given);
        let (rest, _) = steps(&resumed(3, false, &again)?, if given == 8 { 0 } else { usize::MAX });
        seen.iter_mut().zip(rest).for_each(|(seen, rest)| seen.extend(rest));
        assert_eq!(seen, expected, "after {given}");
        for last in 1..=4 {
            let third = resumed(last, false, &again)?;
            let size = third[0].iter().size_hint().1;
            let (rest, _) = steps(&resumed(last, false, &again)?, usize::MAX);
            assert!(rest.iter().all(|batches| Some(batches.len()) == size), "{last} ranks after {given}");
            let seen: Vec<Vec<Vec<i64>>> = expected.iter().map(|batches| batches[..given].to_vec()).collect();
            let (repeated, missing) = repeated_and_missing(&[first.clone(), seen, rest]);
            // Two batches are the padding of three ranks, up to three that of the last ones.
            assert!(
                missing == 0 && repeated <= 4 + 2 * (last - 1),
                "{last} ranks after {given}: {repeated}, {missing}"
            );
        }
    }
    Ok(())
}

#[test]
fn a_bad_batch_is_replaced_in_the_rest_of_an_epoch() -> Result<(), DataError> {
    // The second file has nulls in each row group.
    let files = ["numbers", "nulls"].map(|name| fixture("parquet").join(format!("{name}.parquet")));
    let build = |rank, world_size, workers| {
        let batches = ParquetDataset::from_files(files.clone())?.select(["int64"])?.batches(5)?.window(1);
        batches.rank(rank, world_size)?.loader().num_workers(workers).on_error(OnError::Replace).build()
    };
    let first = build(0, 2, 0)?;
    assert_eq!(first.iter().take(2).filter(Result::is_ok).count(), 2);
    let run = |workers| {
        let mut one = build(0, 1, workers)?;
        one.load_state_dict(&first.state_dict().unwrap()).unwrap();
        let found: Vec<Vec<i64>> = one.iter().map(|batch| Ok(rows(&batch?))).collect::<Result<_, DataError>>()?;
        assert!(one.faults().len() >= 10);
        Ok::<_, DataError>(found)
    };
    let found = run(0)?;
    assert_eq!(found.len(), 2 * 10);
    assert_eq!(run(2)?, found);
    Ok(())
}

#[test]
fn states_that_no_ranks_can_have_are_refused() -> Result<(), DataError> {
    let refused = |changes: &[(&str, Entry)]| {
        let (_, saved) = steps(&ranks(2, false).unwrap(), 4);
        let mut state = StateDict::new();
        saved.into_iter().for_each(|(key, entry)| state.insert(key, entry));
        for (key, entry) in changes {
            let entry = match entry {
                Entry::Int(number) => Entry::Int(*number),
                Entry::Text(text) => Entry::Text(text.clone()),
                other => panic!("{other:?}"),
            };
            state.insert(*key, entry);
        }
        match ranks(3, false).unwrap()[0].load_state_dict(&state) {
            Err(StateError::Mismatch { key, .. }) => key,
            other => panic!("{changes:?}: {other:?}"),
        }
    };
    let text = |text: &str| Entry::Text(text.to_owned());
    for ranks in [0, -1, 5, 31, i64::MAX] {
        assert_eq!(refused(&[("ranks", Entry::Int(ranks)), ("batch", Entry::Int(16))]), "ranks");
    }
    for batch in [16, i64::MAX] {
        assert_eq!(refused(&[("batch", Entry::Int(batch))]), "ranks");
    }
    let many = ["1:0"; 9].join(" ");
    for earlier in ["", "2", "2:4:1", "0:0", "2:16", "2:4 3:9", "4294967296:0", "a:b", many.as_str()] {
        assert_eq!(refused(&[("earlier_ranks", text(earlier))]), "earlier_ranks", "{earlier}");
    }
    assert_eq!(refused(&[("earlier_ranks", text(&["1:0"; 8].join(" ")))]), "ranks");
    let ahead = refused(&[("ahead", text("6"))]);
    assert_eq!(ahead, "ahead", "out of order");
    Ok(())
}
