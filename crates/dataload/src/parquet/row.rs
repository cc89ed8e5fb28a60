//! Single rows: by index, or as a stream whose shards are the row groups.

use std::sync::Arc;

use tch::Tensor;

use super::array::Array;
use super::column::ParquetValues;
use super::dataset::ParquetDataset;
use super::field::Element;
use super::words::Spare;
use crate::{Cancellation, DataError, Dataset, Deferred, IterableDataset, Map, Samples};

/// One row of the selected columns.
#[derive(Debug)]
pub struct ParquetRow {
    values: Vec<(Arc<str>, ParquetValue)>,
}

/// One value of a row.
#[derive(Debug)]
#[non_exhaustive]
pub enum ParquetValue {
    /// An integer, or a bool as 0 or 1.
    Int(i64),
    /// A floating-point number.
    Float(f64),
    /// A string or a binary value.
    Bytes(Vec<u8>),
    /// A list of numbers `[N]`.
    Tensor(Tensor),
    /// Anything else: the column's values in this one row.
    Values(ParquetValues),
}

impl ParquetRow {
    /// The values with the names of their columns, in the selected order.
    pub fn values(&self) -> impl ExactSizeIterator<Item = (&str, &ParquetValue)> {
        self.values.iter().map(|(name, value)| (&**name, value))
    }

    /// The value of the column of this name, if there is one.
    pub fn get(&self, name: &str) -> Option<&ParquetValue> {
        self.values().find(|(column, _)| *column == name).map(|(_, value)| value)
    }

    /// The value of a column of integers or bools.
    pub fn int(&self, name: &str) -> Option<i64> {
        match self.get(name) {
            Some(ParquetValue::Int(value)) => Some(*value),
            _ => None,
        }
    }

    /// The value of a column of floating-point numbers.
    pub fn float(&self, name: &str) -> Option<f64> {
        match self.get(name) {
            Some(ParquetValue::Float(value)) => Some(*value),
            _ => None,
        }
    }

    /// The value of a column of strings or binary values.
    pub fn bytes(&self, name: &str) -> Option<&[u8]> {
        match self.get(name) {
            Some(ParquetValue::Bytes(value)) => Some(value),
            _ => None,
        }
    }

    /// The value of a column of lists of numbers.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        match self.get(name) {
            Some(ParquetValue::Tensor(value)) => Some(value),
            _ => None,
        }
    }

    /// The bytes of its strings and lists of numbers.
    fn bytes_of_values(&self) -> usize {
        let bytes = |value: &ParquetValue| match value {
            ParquetValue::Bytes(bytes) => bytes.len(),
            ParquetValue::Tensor(tensor) => tensor.numel() * tensor.kind().elt_size_in_bytes(),
            _ => 0,
        };
        self.values.iter().map(|(_, value)| bytes(value)).sum()
    }

    /// The values with the names of their columns, owned.
    pub fn into_values(self) -> Vec<(Arc<str>, ParquetValue)> {
        self.values
    }
}

impl ParquetDataset {
    /// The rows, each passed through `transform`. The result is both a [`Dataset`] and an [`IterableDataset`], as this
    /// is.
    ///
    /// ```no_run
    /// use overdrive_dataload::{DataError, DataLoader, Dataset, IterableDataset, ParquetDataset};
    ///
    /// let rows = ParquetDataset::open("train-*.parquet")?;
    /// let labels = rows.map(|row| row.int("label").ok_or_else(|| DataError::other("no label")));
    /// let in_any_order = DataLoader::builder(labels.clone()).batch_size(64).build()?;
    /// let by_row_group = DataLoader::stream(labels).batch_size(64).shuffle(true).shuffle_buffer(500).build()?;
    /// # Ok::<(), DataError>(())
    /// ```
    pub fn map<T, F>(self, transform: F) -> Map<Self, F>
    where
        F: Fn(ParquetRow) -> Result<T, DataError> + Send + Sync,
    {
        Map::new(self, transform)
    }

    fn row(&self, arrays: &[Array], row: usize) -> Result<ParquetRow, DataError> {
        // Rows of one row group are indexed with 32 bits.
        let row = u32::try_from(row).map_err(|_| DataError::IndexOutOfRange { index: row, len: u32::MAX as usize })?;
        let value = |array: &Array| value(array.gather(&[row])?);
        let values = self.columns.iter().zip(arrays).map(|(column, array)| Ok((column.name.clone(), value(array)?)));
        Ok(ParquetRow { values: values.collect::<Result<_, DataError>>()? })
    }
}

/// The value of an array of one row.
fn value(array: Array) -> Result<ParquetValue, DataError> {
    macro_rules! number {
        ($type:ty) => {
            bytemuck::pod_read_unaligned::<$type>(array.values.bytes())
        };
    }
    let plain = array.offsets.is_empty() && array.per_row == 1;
    Ok(match array.element {
        Element::Bool | Element::Uint8 if plain => ParquetValue::Int(number!(u8).into()),
        Element::Int8 if plain => ParquetValue::Int(number!(i8).into()),
        Element::Int16 if plain => ParquetValue::Int(number!(i16).into()),
        Element::Int32 | Element::Uint16 if plain => ParquetValue::Int(number!(i32).into()),
        Element::Int64 | Element::Uint32 if plain => ParquetValue::Int(number!(i64)),
        Element::Half if plain => ParquetValue::Float(half::f16::from_bits(number!(u16)).into()),
        Element::Float if plain => ParquetValue::Float(number!(f32).into()),
        Element::Double if plain => ParquetValue::Float(number!(f64)),
        Element::Fixed(_) if plain => ParquetValue::Bytes(array.values.bytes().to_vec()),
        Element::Bytes if array.offsets.len() == 1 => ParquetValue::Bytes(array.values.bytes().to_vec()),
        Element::Bytes | Element::Fixed(_) => ParquetValue::Values(array.into_values()?),
        element if array.offsets.len() <= 1 => {
            let length = (array.values.bytes().len() / element.bytes()) as i64;
            ParquetValue::Tensor(array.values.into_tensor(element.kind(), &[length])?)
        }
        _ => ParquetValue::Values(array.into_values()?),
    })
}

/// Rows by index. The thread that asks for a row decodes its whole row group, and the latest four row groups are kept.
/// So rows in random order over many row groups are slow: use [`ParquetBatches`](crate::ParquetBatches) to shuffle.
impl Dataset for ParquetDataset {
    type Sample = ParquetRow;

    fn len(&self) -> usize {
        self.rows()
    }

    fn get(&self, index: usize) -> Result<ParquetRow, DataError> {
        let len = self.rows();
        if index >= len {
            return Err(DataError::IndexOutOfRange { index, len });
        }
        // The last row group that begins at or before the row, which skips empty ones.
        let group = self.groups.partition_point(|group| group.first_row <= index) - 1;
        let decode = || self.decode(&[group], 1, &Spare::default(), &Cancellation::default());
        let arrays = self.recent.get(group, decode)?;
        self.row(&arrays, index - self.groups[group].first_row)
    }
}

/// Rows in order, one row group per shard.
impl IterableDataset for ParquetDataset {
    type Sample = ParquetRow;

    fn shards(&self) -> usize {
        self.groups.len()
    }

    fn open_shard(&self, shard: usize, position: u64) -> Result<Samples<ParquetRow>, DataError> {
        self.rows_from(shard, position, &Cancellation::default())
    }

    fn open_deferred(
        &self,
        shard: usize,
        position: u64,
        cancelled: &Cancellation,
    ) -> Result<Samples<Deferred<ParquetRow>>, DataError> {
        let rows = self.rows_from(shard, position, cancelled)?.zip(position..);
        let named = |(row, number): (Result<ParquetRow, DataError>, u64)| {
            let row = row?;
            let bytes = row.bytes_of_values();
            Ok(Deferred::ready(row).at("row", number).of_bytes(bytes))
        };
        Ok(Box::new(rows.map(named)))
    }

    /// The file, and the number of the row group in it.
    fn shard_name(&self, shard: usize) -> Option<String> {
        let group = self.groups.get(shard)?;
        Some(format!("{}, row group {}", self.files[group.file].source.path().display(), group.index))
    }
}

impl ParquetDataset {
    fn rows_from(
        &self,
        shard: usize,
        position: u64,
        cancelled: &Cancellation,
    ) -> Result<Samples<ParquetRow>, DataError> {
        let len = self.groups.len();
        let rows = self.groups.get(shard).ok_or(DataError::IndexOutOfRange { index: shard, len })?.rows;
        let first = usize::try_from(position).unwrap_or(usize::MAX).min(rows);
        let arrays = self.decode(&[shard], 1, &Spare::default(), cancelled)?;
        let dataset = self.clone();
        Ok(Box::new((first..rows).map(move |row| dataset.row(&arrays, row))))
    }
}
