//! Rows of a Parquet file, with all names of the prelude in scope.

use overdrive::dataload::{DataError, ParquetDataset};
use overdrive::prelude::*;

#[test]
fn map_of_a_parquet_dataset_is_not_ambiguous() -> anyhow::Result<()> {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../dataload/tests/fixtures/parquet/part-0.parquet");
    let numbers = ParquetDataset::open(file)?.map(|row| row.int("int64").ok_or_else(|| DataError::other("no number")));
    let doubled = numbers.clone().map(|number| Ok(2 * number));
    assert_eq!(doubled.get(3)?, 2 * numbers.get(3)?);
    assert_eq!(doubled.stream([1]).next().transpose()?, Some(2 * numbers.get(8)?));
    let batch = DataLoader::stream(doubled).batch_size(8).interleave(1).build()?.iter().next().transpose()?;
    assert_eq!(batch.map(|numbers| numbers.size()), Some(vec![8]));
    Ok(())
}
