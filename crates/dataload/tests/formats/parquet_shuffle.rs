//! Shuffled rows through the loader and for several ranks: how often row groups are decoded, and that every row is
//! read.

use overdrive_core::Stateful;
use overdrive_dataload::{DataError, ParquetBatches, ParquetDataset, Table};

use crate::fixture;
use crate::parquet::open;
use crate::table::{floats, number};

const ROWS: usize = 60;
const GROUPS: u64 = 9;

/// The rows of each batch.
type Batches = Vec<Vec<i64>>;

fn rows(table: &Table) -> Vec<i64> {
    floats(table.tensor("int64").unwrap()).iter().map(|&number| number as i64).collect()
}

fn sorted(batches: &[Vec<i64>]) -> Vec<i64> {
    let mut all = batches.concat();
    all.sort_unstable();
    all
}

fn all_rows(times: usize) -> Vec<i64> {
    let mut all: Vec<i64> = (0..times).flat_map(|_| (0..ROWS).map(|i| number(i) as i64)).collect();
    all.sort_unstable();
    all
}

fn epoch(batches: &ParquetBatches, epoch: u64) -> Vec<Vec<i64>> {
    batches.epoch(epoch).map(|batch| rows(&batch.unwrap())).collect()
}

#[test]
fn the_loaders_own_shuffle_mixes_rows_and_decodes_each_row_group_once_an_epoch() -> Result<(), DataError> {
    for (batch_size, window) in [(1, 1), (2, 2), (7, 3), (4, 1)] {
        let mut expected: Option<Vec<Vec<i64>>> = None;
        for workers in [0, 1, 3] {
            let dataset = open("part-{0..2}");
            let batches = dataset.batches(batch_size)?.window(window);
            let loader = batches.loader().shuffle(true).seed(3).num_workers(workers).build()?;
            let mut found = Vec::new();
            for epoch in 1..=3 {
                let batches: Vec<Vec<i64>> =
                    loader.iter().map(|batch| Ok(rows(&batch?))).collect::<Result<_, DataError>>()?;
                assert_eq!(dataset.decoded_row_groups(), epoch * GROUPS, "{batch_size} {window} {workers}");
                assert_eq!(sorted(&batches), all_rows(1));
                found.push(batches.concat());
            }
            assert!(found[0] != found[1] && !found[0].is_sorted());
            assert_eq!(expected.get_or_insert_with(|| found.clone()), &found, "{workers} workers");
        }
        // Equal to the batches' own shuffle.
        let batches = open("part-{0..2}").batches(batch_size)?.window(window).shuffle(true).seed(3);
        assert_eq!(expected.map(|found| found[2].clone()), Some(epoch(&batches, 2).concat()));
    }
    Ok(())
}

/// The batches of every rank, and how many row groups they decoded together.
fn ranks(
    dataset: impl Fn() -> ParquetDataset,
    world_size: usize,
    make: impl Fn(ParquetBatches) -> ParquetBatches,
) -> Result<(Vec<Batches>, u64), DataError> {
    let (mut all, mut decoded) = (Vec::new(), 0);
    for rank in 0..world_size {
        let dataset = dataset();
        let batches = make(dataset.batches(2)?).rank(rank, world_size)?;
        let loader = batches.clone().loader().num_workers(rank % 3).build()?;
        let found: Vec<Vec<i64>> = loader.epoch(1).map(|batch| Ok(rows(&batch?))).collect::<Result<_, DataError>>()?;
        decoded += dataset.decoded_row_groups();
        assert_eq!(Some(found.len()), loader.len());
        assert_eq!(epoch(&batches, 1), found, "by its own threads");
        all.push(found);
    }
    Ok((all, decoded))
}

#[test]
fn ranks_share_the_row_groups_and_have_equally_many_batches() -> Result<(), DataError> {
    for shuffle in [false, true] {
        for world_size in [1, 2, 3, 4, 8, 60, 70] {
            for drop_last in [false, true] {
                let make = |batches: ParquetBatches| batches.window(1).shuffle(shuffle).seed(5).drop_last(drop_last);
                let (found, decoded) = ranks(|| open("part-{0..2}"), world_size, make)?;
                assert!(found.iter().all(|batches| batches.len() == found[0].len()), "{world_size}");
                // Cuts may go through row groups, and the end is filled up from the start.
                let most = GROUPS + world_size as u64;
                assert!(decoded <= most, "{decoded} row groups decoded by {world_size} ranks, at most {most}");
                let mut seen = sorted(&found.concat());
                let in_all = seen.len();
                seen.dedup();
                if drop_last {
                    let share = ROWS / world_size / 2 * 2;
                    assert_eq!((seen.len(), in_all), (share * world_size, share * world_size), "none twice");
                } else {
                    assert_eq!((seen, in_all), (all_rows(1), ROWS.div_ceil(world_size) * world_size));
                }
            }
        }
    }
    Ok(())
}

#[test]
fn ranks_decode_different_row_groups_where_those_divide_evenly() -> Result<(), DataError> {
    // Eight files with row groups of 8, 8 and 4 rows each, so that every rank gets one file.
    let path = fixture("parquet").join("part-0.parquet");
    let dataset = || ParquetDataset::from_files(vec![path.clone(); 8]).unwrap();
    let (found, decoded) = ranks(dataset, 8, |batches| batches.window(3))?;
    assert_eq!(decoded, 24);
    assert!(found.iter().all(|batches| batches.concat().len() == 20));
    // In a random order of row groups, cuts go through some of them.
    let (_, decoded) = ranks(dataset, 8, |batches| batches.window(3).shuffle(true))?;
    assert!((24..=24 + 7).contains(&decoded), "{decoded}");
    Ok(())
}

#[test]
fn a_ranks_state_fits_only_the_same_batches() -> Result<(), Box<dyn std::error::Error>> {
    let of = |batch_size, rank, world_size| {
        let batches = open("part-{0..2}").batches(batch_size)?.window(2).rank(rank, world_size)?;
        batches.loader().shuffle(true).seed(8).build()
    };
    let build = |rank, world_size| of(3, rank, world_size);
    let expected: Vec<Vec<i64>> = build(1, 3)?.iter().map(|batch| rows(&batch.unwrap())).collect();
    let first = build(1, 3)?;
    let mut found: Vec<Vec<i64>> = first.iter().take(4).map(|batch| rows(&batch.unwrap())).collect();
    let state = first.state_dict()?;
    let mut second = build(1, 3)?;
    second.load_state_dict(&state)?;
    found.extend(second.iter().map(|batch| rows(&batch.unwrap())));
    assert_eq!(found, expected);
    for batch_size in [2, 60] {
        let error = of(batch_size, 1, 3)?.load_state_dict(&state).unwrap_err().to_string();
        assert!(error.contains("`parquet.batch_size`"), "{error}");
    }
    // A state of a loader that permuted whole batches has no `shuffle_rows`.
    let mut before = overdrive_core::StateDict::new();
    for (key, entry) in state.iter().filter(|(key, _)| *key != "shuffle_rows") {
        match entry {
            overdrive_core::Entry::Int(number) => before.insert(key, overdrive_core::Entry::Int(*number)),
            _ => before.insert(key, overdrive_core::Entry::Text(String::new())),
        }
    }
    assert!(build(1, 3)?.load_state_dict(&before).unwrap_err().to_string().contains("shuffle_rows"));
    assert!(open("part-{0..2}").batches(3)?.rank(3, 3).is_err());
    Ok(())
}

#[test]
fn a_loader_decodes_the_next_window_before_a_batch_needs_it() -> Result<(), DataError> {
    for workers in [0, 1] {
        let dataset = open("part-{0..2}");
        // Row groups of 8, 8 and 4 rows in each file, so that the first four batches need the first window alone.
        let loader = dataset.batches(2)?.window(1).loader().num_workers(workers).prefetch_factor(1).build()?;
        let mut epoch = loader.iter();
        assert_eq!(rows(&epoch.next().unwrap()?), [number(0) as i64, number(1) as i64]);
        let begun = std::time::Instant::now();
        while dataset.decoded_row_groups() < 2 {
            assert!(begun.elapsed().as_secs() < 600, "{workers} workers: the next window is not decoded");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        // No further one, and none twice.
        assert_eq!(dataset.decoded_row_groups(), 2);
        assert_eq!(epoch.filter(Result::is_ok).count(), ROWS / 2 - 1);
        assert_eq!(dataset.decoded_row_groups(), GROUPS, "{workers} workers");
    }
    Ok(())
}
