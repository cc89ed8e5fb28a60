//! One sample: the lengths of its values that are not fixed, and the values.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::encoding::{Encoding, MdsValue};
use crate::DataError;

/// A column of all samples of a shard.
#[derive(Debug)]
pub(super) struct Column {
    name: String,
    encoding: Encoding,
    /// The length of its values in bytes, where it is fixed.
    size: Option<u32>,
}

impl Column {
    pub(super) fn new(name: &str, encoding: Encoding, size: Option<u32>) -> Self {
        Self { name: name.to_owned(), encoding, size }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }
}

/// A sample of an [`MdsDataset`](super::MdsDataset): a value for each column.
#[derive(Clone, Debug)]
pub struct MdsSample {
    bytes: Vec<u8>,
    /// Where the values are, in the order of the columns.
    values: Vec<Range<usize>>,
    columns: Arc<[Column]>,
    shard: Arc<Path>,
    offset: u64,
}

impl MdsSample {
    pub(super) fn new(
        bytes: Vec<u8>,
        offset: u64,
        shard: &Arc<Path>,
        columns: &Arc<[Column]>,
    ) -> Result<Self, DataError> {
        let mut at = 4 * columns.iter().filter(|column| column.size.is_none()).count();
        let (mut lengths, mut values) = (bytes.as_chunks::<4>().0.iter(), Vec::with_capacity(columns.len()));
        let corrupt =
            |at: usize, expected: String, found: String| DataError::corrupt(shard, offset + at as u64, expected, found);
        for column in columns.iter() {
            let length = column.size.or_else(|| lengths.next().map(|&length| u32::from_le_bytes(length)));
            let end = length.and_then(|length| at.checked_add(length as usize)).filter(|&end| end <= bytes.len());
            let Some(end) = end else {
                let expected = format!("a value of the column {:?} that ends within the sample", column.name);
                let found = format!("one of {} bytes in {}", length.unwrap_or_default(), bytes.len());
                return Err(corrupt(at.min(bytes.len()), expected, found));
            };
            values.push(at..end);
            at = end;
        }
        if at != bytes.len() {
            let expected = "the end of the sample behind its last value".to_owned();
            return Err(corrupt(at, expected, format!("{} more bytes", bytes.len() - at)));
        }
        Ok(Self { bytes, values, columns: columns.clone(), shard: shard.clone(), offset })
    }

    /// How much memory its values take.
    pub(crate) fn len_in_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// The names of the columns, in order.
    pub fn columns(&self) -> impl ExactSizeIterator<Item = &str> {
        self.columns.iter().map(Column::name)
    }

    /// The shard that contains the sample.
    pub fn shard(&self) -> &Path {
        &self.shard
    }

    /// The offset of the sample in its shard; in a compressed one, in the decompressed content.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// A value as it is stored, whatever its encoding.
    pub fn raw(&self, column: &str) -> Option<&[u8]> {
        let position = self.columns.iter().position(|it| it.name == column)?;
        Some(&self.bytes[self.values[position].clone()])
    }

    /// A value. Of a JPEG or PNG these are the file's bytes: decode them in an
    /// [`ImagePipeline`](crate::ImagePipeline), or with [`decode_image`](crate::decode_image).
    ///
    /// # Errors
    /// [`DataError::Layout`] for a column that the shard does not have, or an encoding that is not supported (`pkl`,
    /// which may run code, and lists); [`DataError::Corrupt`] with column and byte, for a value that is not what its
    /// encoding says.
    pub fn get(&self, column: &str) -> Result<MdsValue<'_>, DataError> {
        let Some(position) = self.columns.iter().position(|it| it.name == column) else {
            let names: Vec<&str> = self.columns().collect();
            return Err(DataError::layout(
                &self.shard,
                format!("a column {column:?}"),
                format!("the columns {names:?}"),
            ));
        };
        let (range, encoding) = (self.values[position].clone(), &self.columns[position].encoding);
        let at = self.offset + range.start as u64;
        if let Encoding::Other(name) = encoding {
            let expected = format!("an encoding that this crate reads, in the column {column:?}");
            return Err(DataError::layout(&self.shard, expected, name.as_str()));
        }
        encoding.decode(&self.bytes[range]).map_err(|found| {
            DataError::corrupt(&self.shard, at, format!("{} in the column {column:?}", encoding.wanted()), found)
        })
    }
}
