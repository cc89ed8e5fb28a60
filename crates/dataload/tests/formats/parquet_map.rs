//! `map` on rows, with both traits that have a `map` in scope.

use overdrive_dataload::{DataError, DataLoader, Dataset, IterableDataset, Row};

use crate::parquet::open;
use crate::table::number;

const ROWS: usize = 60;

fn in_order() -> Vec<i64> {
    (0..ROWS).map(|i| 2 * number(i) as i64).collect()
}

fn first(row: Row) -> Result<i64, DataError> {
    row.int("int64").ok_or_else(|| DataError::other("no number"))
}

#[test]
fn mapped_rows_are_a_dataset_and_a_stream() -> Result<(), DataError> {
    let rows = open("part-{0..2}").map(|row| row.int("int64").ok_or_else(|| DataError::other("no number")));
    let doubled = rows.clone().map(|number| Ok(2 * number));
    assert_eq!((0..doubled.len()).map(|i| doubled.get(i)).collect::<Result<Vec<_>, _>>()?, in_order());
    assert_eq!(doubled.stream(0..9).collect::<Result<Vec<_>, _>>()?, in_order());
    assert_eq!(doubled.shard_name(1).map(|name| name.ends_with("row group 1")), Some(true));
    let listed = |numbers: Vec<i64>| Ok(numbers);
    let by_number = DataLoader::builder(doubled.clone()).batch_size(7).collate(listed).build()?;
    assert_eq!(by_number.iter().collect::<Result<Vec<_>, _>>()?.concat(), in_order());
    let by_shard = DataLoader::stream(doubled).batch_size(7).interleave(1).num_workers(2).collate(listed).build()?;
    assert_eq!(by_shard.iter().collect::<Result<Vec<_>, _>>()?.concat(), in_order());
    // Functions and closures chained, and a subset of the result.
    let all = open("part-{0..2}").map(first).map(|number| Ok(number.to_string())).map(|text| Ok(text + "!"));
    assert_eq!(all.subset([3, 1])?.get(0)?, format!("{}!", number(3) as i64));
    Ok(())
}
