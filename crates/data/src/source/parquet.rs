//! Rows of Parquet files.

use std::path::Path;

use anyhow::{Result, bail};
use overdrive_dataload::{FieldKind, ParquetDataset, Row, Value};

use super::rows::{names, sample};
use super::{Source, all, open_shards};

pub fn open(path: &Path) -> Result<Source> {
    let dataset = open_shards(path, ParquetDataset::from_files, ParquetDataset::open)?;
    let named = names(dataset.fields());
    let total = Some(dataset.rows() as u64);
    // The reader fills nulls. What they are filled with tells them from values: where two fillings differ, there is none.
    let nullable = dataset.fields().filter(|field| field.nullable() && field.lists() < 2);
    let nullable: Vec<_> = nullable.map(|field| (field.name().to_owned(), field.kind().clone())).collect();
    let filled = |byte: u8| {
        nullable.iter().try_fold(dataset.clone(), |dataset, (column, kind)| match kind {
            FieldKind::Number(_) => dataset.fill_null(column, byte.into()),
            FieldKind::Bytes => dataset.fill_null_bytes(column, &[byte]),
            FieldKind::FixedBytes(length) => dataset.fill_null_bytes(column, &vec![byte; *length]),
            // Refused by name where it is read.
            _ => Ok(dataset),
        })
    };
    let pairs = all(filled(0)?).zip(all(filled(1)?));
    let samples = pairs.enumerate().map(move |(index, (row, other))| {
        let (row, other) = (row?, other?);
        for (column, value) in row.values() {
            if let (Value::Tensor(one), Some(Value::Tensor(other))) = (value, other.get(column))
                && !one.f_allclose(other, 0.0, 0.0, true)?
            {
                bail!("row {index}: column {column:?} has a null in its list, which no field can hold");
            }
        }
        sample(&row, index, &named, |column| differ(&row, &other, column))
    });
    Ok(Source { total, samples: Box::new(samples) })
}

fn differ(row: &Row, other: &Row, column: &str) -> bool {
    match (row.get(column), other.get(column)) {
        (Some(Value::Int(one)), Some(Value::Int(other))) => one != other,
        // A value that is not a number is equal to itself here.
        (Some(Value::Float(one)), Some(Value::Float(other))) => one.to_bits() != other.to_bits(),
        (Some(Value::Bytes(one)), Some(Value::Bytes(other))) => one != other,
        _ => false,
    }
}
