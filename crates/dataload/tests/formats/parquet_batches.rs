//! Shuffled batches: every row once, in the same order on any number of threads and from any first batch.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use overdrive_dataload::{DataError, OnError, ParquetBatches, ParquetDataset, Ragged, Table, TensorBatch};

use crate::fixture;
use crate::parquet::open;
use crate::table::{floats, ints, number, text};

const ROWS: usize = 60;

/// The rows of a batch; all its columns must belong to the same row.
fn rows(table: &Table) -> Vec<i64> {
    let numbers: Vec<i64> = floats(table.tensor("int64").unwrap()).iter().map(|&number| number as i64).collect();
    let (texts, lists) = (table.bytes("text").unwrap(), table.ragged("ints").unwrap());
    let (values, offsets) = (floats(&lists.clone().into_tensors().unwrap().0), lists.offsets(0).unwrap());
    for (row, &found) in numbers.iter().enumerate() {
        let i = (0..ROWS).find(|&i| number(i) as i64 == found).unwrap();
        assert_eq!(texts.get(row), Some(&*text(i)));
        assert_eq!(values[offsets[row] as usize..offsets[row + 1] as usize], ints(i));
    }
    assert_eq!(table.rows(), numbers.len());
    numbers
}

fn parts() -> ParquetDataset {
    open("part-{0..2}")
}

fn epoch(batches: &ParquetBatches, epoch: u64) -> Vec<Vec<i64>> {
    batches.epoch(epoch).map(|batch| rows(&batch.unwrap())).collect()
}

fn in_order() -> Vec<i64> {
    (0..ROWS).map(|i| number(i) as i64).collect()
}

#[test]
fn batches_in_order() {
    for (size, threads, window) in [(7, 1, 1), (7, 3, 2), (1, 2, 4), (25, 2, 1), (100, 4, 3), (60, 2, 100)] {
        let batches = parts().threads(threads).batches(size).unwrap().window(window);
        let found = epoch(&batches, 0);
        assert_eq!((found.len(), found.concat()), (batches.len(), in_order()));
        assert!(found.iter().rev().skip(1).all(|batch| batch.len() == size));
        assert_eq!(epoch(&batches.drop_last(true), 0).concat(), in_order()[..ROWS / size * size]);
    }
    assert!(matches!(parts().batches(0), Err(DataError::InvalidOption { option: "batch_size", .. })));
}

#[test]
fn the_order_is_a_function_of_seed_and_epoch() {
    let of = |seed, number, threads| {
        epoch(&parts().threads(threads).batches(7).unwrap().shuffle(true).seed(seed).window(3), number)
    };
    let first = of(1, 0, 1);
    assert_eq!(first, of(1, 0, 4));
    let mut sorted = first.concat();
    assert_ne!(sorted, in_order());
    sorted.sort_unstable();
    let mut expected = in_order();
    expected.sort_unstable();
    assert_eq!(sorted, expected);
    for other in [of(1, 1, 2), of(2, 0, 2)] {
        assert_ne!(first, other);
        let mut other = other.concat();
        other.sort_unstable();
        assert_eq!(other, expected);
    }
    // The rows of a window are mixed: its first batch has rows of more than one of its three row groups.
    let place = |number: i64| (0..ROWS).find(|&i| super::table::number(i) as i64 == number).unwrap();
    let groups: Vec<usize> = first[0].iter().map(|&number| place(number) / 20 * 3 + place(number) % 20 / 8).collect();
    assert!(groups.iter().any(|group| *group != groups[0]), "{groups:?}");
}

#[test]
fn an_epoch_starts_at_any_batch_and_single_batches_agree() {
    for (shuffle, size) in [(true, 7), (false, 7), (true, 20)] {
        let batches = parts().batches(size).unwrap().shuffle(shuffle).seed(5).window(2);
        let whole = epoch(&batches, 3);
        for from in 0..=whole.len() + 1 {
            let rest: Vec<_> = batches.epoch_from(3, from).map(|batch| rows(&batch.unwrap())).collect();
            assert_eq!(rest, whole[from.min(whole.len())..], "from {from}");
        }
        for (number, batch) in whole.iter().enumerate().rev() {
            assert_eq!(rows(&batches.batch(3, number).unwrap()), *batch);
        }
        let len = whole.len();
        assert!(matches!(batches.batch(3, len), Err(DataError::IndexOutOfRange { index, .. }) if index == len));
        // Threads share the windows.
        std::thread::scope(|scope| {
            for worker in 0..3 {
                let (batches, whole) = (&batches, &whole);
                scope.spawn(move || {
                    for number in (worker..whole.len()).step_by(3) {
                        assert_eq!(rows(&batches.batch(3, number).unwrap()), whole[number]);
                    }
                });
            }
        });
    }
}

#[test]
fn the_tensors_of_a_batch_can_be_moved() {
    let batch = parts().batches(7).unwrap().batch(0, 0).unwrap();
    let moved = batch.map_tensors(&mut |tensor| Ok(tensor.f_add(tensor)?)).unwrap();
    let doubled: Vec<f64> = (0..7).map(|i| 2.0 * number(i)).collect();
    assert_eq!(floats(moved.tensor("int64").unwrap()), doubled);
    assert_eq!(moved.bytes("text").unwrap().get(5), Some(&*text(5)));
    let mut tensors = 0;
    moved.visit_tensors(&mut |_| tensors += 1);
    // The numbers, and the values and offsets of the lists.
    let (before, after) = (batch.ragged("ints").unwrap(), moved.ragged("ints").unwrap());
    assert_eq!((tensors, after.rows()), (3, 7));
    let values = |lists: &Ragged| floats(&lists.clone().into_tensors().unwrap().0);
    assert_eq!(values(after), values(before).iter().map(|value| 2.0 * value).collect::<Vec<_>>());
    // What the host knows is not copied.
    let address = |lists: &Ragged| lists.offsets(0).unwrap().as_ptr();
    assert_eq!(address(after), address(before));
    let text = |table: &Table| table.bytes("text").unwrap().get(5).unwrap().as_ptr();
    assert_eq!(text(&moved), text(&batch));
}

#[test]
fn an_error_ends_the_epoch_and_a_break_ends_its_threads() {
    let mut batches = open("nulls").batches(7).unwrap().window(1).epoch(0);
    assert!(matches!(batches.next(), Some(Err(DataError::Layout { .. }))));
    assert!(batches.next().is_none() && batches.size_hint() == (0, Some(0)));
    let batches = parts().batches(2).unwrap().shuffle(true);
    for _ in 0..5 {
        assert!(batches.epoch(0).next().unwrap().is_ok());
    }
}

#[test]
fn the_loader_gives_the_same_batches_and_resumes_among_them() -> Result<(), Box<dyn std::error::Error>> {
    use overdrive_core::Stateful;
    let batches = || parts().batches(7).map(|batches| batches.shuffle(true).seed(4).window(2));
    let expected: Vec<_> = [0, 1].map(|number| epoch(&batches().unwrap(), number)).concat();
    for workers in [0, 1, 3] {
        let build = || batches()?.loader().num_workers(workers).build();
        let first = build()?;
        let mut found: Vec<_> = first.iter().map(|batch| rows(&batch.unwrap())).collect();
        found.extend(first.iter().take(3).map(|batch| rows(&batch.unwrap())));
        let mut second = build()?;
        second.load_state_dict(&first.state_dict()?)?;
        found.extend(second.iter().map(|batch| rows(&batch.unwrap())));
        assert_eq!(found, expected, "{workers} workers");
        let samples: usize = found.iter().map(|rows| rows.len()).sum();
        assert_eq!((first.stats().samples + second.stats().samples) as usize, samples, "rows count, not batches");
    }
    let state = batches()?.loader().build()?.state_dict()?;
    let other = batches()?.seed(5).loader().build()?.load_state_dict(&state).unwrap_err().to_string();
    assert!(other.contains("parquet.seed"), "{other}");
    let two = batches()?.loader().batch_size(2).build()?;
    assert!(matches!(two.iter().next(), Some(Err(DataError::InvalidOption { option: "batch_size", .. }))));
    Ok(())
}

#[test]
fn a_loader_skips_or_replaces_the_batch_of_a_bad_row_and_names_the_row() -> Result<(), DataError> {
    // The second file has nulls in each row group.
    let files = ["numbers", "nulls"].map(|name| fixture("parquet").join(format!("{name}.parquet")));
    for workers in [0, 2] {
        let build = |policy| {
            let rows = ParquetDataset::from_files(files.clone())?.select(["int64"])?.batches(5)?.window(1);
            rows.loader().num_workers(workers).on_error(policy).build()
        };
        for (policy, batches) in [(OnError::Skip, ROWS / 5), (OnError::Replace, 2 * ROWS / 5)] {
            let loader = build(policy)?;
            let found: Vec<Table> = loader.iter().collect::<Result<_, _>>()?;
            assert_eq!(found.len(), batches);
            let good = in_order();
            assert!(found.iter().all(|table| good.contains(&(floats(table.tensor("int64").unwrap())[0] as i64))));
            let faults = loader.faults();
            assert!(faults.len() >= ROWS / 5 && faults.iter().all(|fault| fault.error.contains("nulls.parquet")));
            assert!(faults.iter().any(|fault| fault.error.ends_with("found a null in row 6 of row group 1")));
        }
        let error = build(OnError::Fail)?.iter().find_map(Result::err).unwrap();
        assert_eq!(error.index(), Some(ROWS / 5));
        assert!(error.to_string().ends_with("found a null in row 3 of row group 0"), "{error}");
    }
    Ok(())
}

#[test]
fn batches_without_columns_count_rows() -> Result<(), DataError> {
    for shuffle in [false, true] {
        let batches = parts().select([""; 0])?.batches(7)?.shuffle(shuffle).window(2);
        let of_rows = |found: Vec<Table>| found.iter().map(Table::rows).collect::<Vec<_>>();
        let expected = [[7; 8].as_slice(), &[4]].concat();
        assert_eq!(of_rows((0..9).map(|number| batches.batch(0, number)).collect::<Result<_, _>>()?), expected);
        assert_eq!(of_rows(batches.epoch(0).collect::<Result<_, _>>()?), expected);
        for workers in [0, 2] {
            let loader = batches.clone().loader().num_workers(workers).build()?;
            assert_eq!(of_rows(loader.iter().collect::<Result<_, _>>()?), expected);
        }
    }
    Ok(())
}

#[test]
fn threads_decode_together_however_few_batches_are_left() -> Result<(), DataError> {
    for (dataset, batch_size, batches, workers) in
        [(parts(), ROWS, 1, 3), (parts(), 40, 2, 3), (open("empty"), 7, 0, 0)]
    {
        let loader = dataset.batches(batch_size)?.loader().num_workers(3).build()?;
        assert_eq!(loader.iter().collect::<Result<Vec<_>, _>>()?.len(), batches);
        assert_eq!(loader.stats().workers, workers);
    }
    // More than a loader may have workers.
    assert_eq!(epoch(&parts().threads(2000).batches(7)?, 0).concat(), in_order());
    Ok(())
}

#[test]
fn threads_that_only_decode_are_no_workers() -> Result<(), DataError> {
    let called = Arc::new(AtomicUsize::new(0));
    let counter = called.clone();
    let loader = parts().threads(3).batches(7)?.window(1).loader().worker_init_fn(move |_| {
        counter.fetch_add(1, SeqCst);
        Err(DataError::other("no licence"))
    });
    let loader = loader.num_workers(0).build()?;
    assert_eq!(loader.iter().map(|batch| rows(&batch.unwrap())).collect::<Vec<_>>().concat(), in_order());
    assert_eq!(called.load(SeqCst), 0);
    Ok(())
}

#[test]
fn ranks_make_as_many_steps_where_one_skips_batches() -> Result<(), DataError> {
    // Every row group of the third file is bad, and it belongs to the second rank.
    let files =
        ["numbers", "numbers", "nulls", "numbers"].map(|name| fixture("parquet").join(format!("{name}.parquet")));
    for workers in [0, 2] {
        let [first, second] = [0, 1].map(|rank| {
            let batches = ParquetDataset::from_files(files.clone())?.select(["int64"])?.batches(5)?.window(1);
            let loader = batches.rank(rank, 2)?.loader().num_workers(workers).on_error(OnError::Skip).build()?;
            let steps = loader.iter().collect::<Result<Vec<_>, _>>()?.len();
            Ok::<_, DataError>((steps, loader.faults().len()))
        });
        let ((first, faults), (second, skipped)) = (first?, second?);
        assert_eq!((first, faults, second), (2 * ROWS / 5, 0, first), "{workers} workers");
        assert!(skipped >= ROWS / 5, "{skipped}");
    }
    Ok(())
}

#[test]
fn a_window_ends_at_its_bytes() -> Result<(), DataError> {
    // Row groups of 25, 25 and 10 rows, of 8 bytes each.
    let first_window = |change: fn(ParquetBatches) -> ParquetBatches| -> Result<u64, DataError> {
        let dataset = open("numbers").select(["int64"])?;
        let batches = change(dataset.batches(5)?);
        assert_eq!(batches.batch(0, 0)?.rows(), 5);
        let decoded = dataset.decoded_row_groups();
        let all: Vec<f64> =
            batches.epoch(0).flat_map(|batch| floats(batch.unwrap().tensor("int64").unwrap())).collect();
        assert_eq!(all, (0..ROWS).map(number).collect::<Vec<_>>());
        Ok(decoded)
    };
    assert_eq!(first_window(|batches| batches)?, 3);
    assert_eq!(first_window(|batches| batches.window_bytes(2 * 25 * 8))?, 2);
    assert_eq!(first_window(|batches| batches.window_bytes(2 * 25 * 8 - 1))?, 1);
    assert_eq!(first_window(|batches| batches.window_bytes(0))?, 1, "one row group at least");
    assert_eq!(first_window(|batches| batches.window(3).window_bytes(2 * 25 * 8))?, 2);
    assert_eq!(first_window(|batches| batches.window(1).window_bytes(2 * 25 * 8))?, 1);
    Ok(())
}

#[test]
#[cfg(target_os = "linux")]
fn more_files_than_may_be_open_are_one_dataset() -> Result<(), DataError> {
    const FILES: usize = 150;
    let dir = tempfile::tempdir().unwrap();
    let part = std::fs::read(fixture("parquet").join("part-0.parquet")).unwrap();
    let files: Vec<_> = (0..FILES).map(|number| dir.path().join(format!("{number:03}.parquet"))).collect();
    files.iter().for_each(|file| std::fs::write(file, &part).unwrap());
    let open_files = || {
        let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        links
            .filter_map(|link| std::fs::read_link(link.path()).ok())
            .filter(|file| file.starts_with(dir.path()))
            .count()
    };
    let dataset = ParquetDataset::from_files(&files)?;
    assert_eq!(open_files(), 0, "only the footers were read");
    let rows = dataset.read()?.rows();
    assert_eq!((rows, dataset.files().count()), (dataset.rows(), FILES));
    assert!((1..=64).contains(&open_files()), "{}", open_files());
    // A file that has changed meanwhile is not read with the footer that it had.
    let changed = ParquetDataset::from_files(&files[..1])?;
    std::fs::write(&files[0], [part.as_slice(), b"more"].concat()).unwrap();
    let error = changed.read().unwrap_err().to_string();
    let message = format!("000.parquet: expected the {} bytes that it had when the dataset was opened", part.len());
    assert!(error.contains(&message), "{error}");
    Ok(())
}
