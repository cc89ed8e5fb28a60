//! The values read from a column: a tensor, lists of different lengths, or strings.

use std::sync::Arc;

use tch::{Kind, Tensor};

use super::array::Array;
use super::element::{Element, encode};
use super::words::Words;
use crate::tensor::tensor_from_bytes;
use crate::{DataError, TensorBatch};

/// The values of a column.
#[derive(Debug)]
#[non_exhaustive]
pub enum Column {
    /// Numbers: one per row, `[N]`, or equally many per row, `[N, M]`.
    Tensor(Tensor),
    /// Lists of different lengths.
    Ragged(Ragged),
    /// Strings or binary values.
    Bytes(BytesColumn),
}

/// Columns of the same rows, by name.
#[derive(Debug)]
pub struct Table {
    rows: usize,
    columns: Vec<(Arc<str>, Column)>,
    /// The columns that tell where another one, `name` of `name.is_null`, has nulls.
    masks: Vec<Arc<str>>,
}

impl Table {
    pub(crate) fn new(
        names: impl Iterator<Item = Arc<str>>,
        arrays: Vec<Array>,
        rows: usize,
    ) -> Result<Self, DataError> {
        let columns = names.zip(arrays).map(|(name, array)| Ok((name, array.into_values()?)));
        Ok(Self { rows, columns: columns.collect::<Result<_, DataError>>()?, masks: Vec::new() })
    }

    #[cfg(feature = "arrow")]
    pub(crate) fn from_columns(columns: Vec<(Arc<str>, Column)>, rows: usize) -> Self {
        Self { rows, columns, masks: Vec::new() }
    }

    #[cfg(feature = "arrow")]
    pub(crate) fn with_masks(mut self, masks: Vec<Arc<str>>) -> Self {
        self.masks = masks;
        self
    }

    #[cfg(feature = "arrow")]
    pub(crate) fn is_mask(&self, name: &str) -> bool {
        self.masks.iter().any(|mask| **mask == *name)
    }

    /// How many rows there are.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The columns with their names, in the selected order.
    pub fn columns(&self) -> impl ExactSizeIterator<Item = (&str, &Column)> {
        self.columns.iter().map(|(name, values)| (&**name, values))
    }

    /// The column of this name, if there is one.
    pub fn get(&self, name: &str) -> Option<&Column> {
        self.columns().find(|(column, _)| *column == name).map(|(_, values)| values)
    }

    /// A column of numbers.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] when there is no column of this name, or it holds lists or strings.
    pub fn tensor(&self, name: &str) -> Result<&Tensor, DataError> {
        match self.get(name) {
            Some(Column::Tensor(tensor)) => Ok(tensor),
            found => Err(other_values("a column of numbers", name, found)),
        }
    }

    /// A column of lists.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] when there is no column of this name, or it holds no lists.
    pub fn ragged(&self, name: &str) -> Result<&Ragged, DataError> {
        match self.get(name) {
            Some(Column::Ragged(ragged)) => Ok(ragged),
            found => Err(other_values("a column of lists", name, found)),
        }
    }

    /// A column of strings or binary values.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] when there is no column of this name, or it holds numbers or lists.
    pub fn bytes(&self, name: &str) -> Result<&BytesColumn, DataError> {
        match self.get(name) {
            Some(Column::Bytes(bytes)) => Ok(bytes),
            found => Err(other_values("a column of strings or binary values", name, found)),
        }
    }
}

impl IntoIterator for Table {
    type Item = (Arc<str>, Column);
    type IntoIter = std::vec::IntoIter<Self::Item>;

    /// The columns, owned.
    fn into_iter(self) -> Self::IntoIter {
        self.columns.into_iter()
    }
}

/// Covers the columns of numbers; strings and ragged lists stay on the host.
impl TensorBatch for Table {
    fn map_tensors(&self, change: &mut dyn FnMut(&Tensor) -> Result<Tensor, DataError>) -> Result<Self, DataError> {
        let columns = self.columns.iter().map(|(name, values)| {
            let values = match values {
                Column::Tensor(tensor) => Column::Tensor(change(tensor)?),
                Column::Ragged(ragged) => Column::Ragged(ragged.clone()),
                Column::Bytes(bytes) => Column::Bytes(bytes.clone()),
            };
            Ok((name.clone(), values))
        });
        let columns = columns.collect::<Result<_, DataError>>()?;
        Ok(Self { rows: self.rows, columns, masks: self.masks.clone() })
    }

    fn visit_tensors<'a>(&'a self, visit: &mut dyn FnMut(&'a Tensor)) {
        for (_, values) in &self.columns {
            if let Column::Tensor(tensor) = values {
                visit(tensor);
            }
        }
    }
}

fn other_values(expected: &str, name: &str, found: Option<&Column>) -> DataError {
    let found = match found {
        Some(Column::Tensor(_)) => "numbers",
        Some(Column::Ragged(_)) => "lists",
        Some(Column::Bytes(_)) => "strings or binary values",
        None => "no column of that name",
    };
    DataError::option("column", expected, format!("{name:?}, {found}"))
}

impl Array {
    pub(crate) fn into_values(self) -> Result<Column, DataError> {
        let (rows, kind) = (self.rows as i64, self.element.kind());
        Ok(match (self.offsets.len(), self.element) {
            (0, Element::Fixed(bytes)) => Column::Tensor(self.values.into_tensor(kind, &[rows, bytes as i64])?),
            (0, _) => {
                let shape: Vec<i64> = [rows].into_iter().chain(self.per_row.map(|length| length as i64)).collect();
                Column::Tensor(self.values.into_tensor(kind, &shape)?)
            }
            (1, Element::Bytes) => Column::Bytes(BytesColumn(Arc::new(self))),
            _ => Column::Ragged(Ragged(Arc::new(self))),
        })
    }
}

/// Strings or binary values, one per row. Clones share their memory.
#[derive(Clone, Debug)]
pub struct BytesColumn(pub(crate) Arc<Array>);

impl BytesColumn {
    /// How many rows there are.
    pub fn len(&self) -> usize {
        self.0.rows
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.0.rows == 0
    }

    /// The value of a row; `None` past the last row.
    pub fn get(&self, row: usize) -> Option<&[u8]> {
        let [offsets] = self.0.offsets.as_slice() else { return None };
        self.0.values.bytes().get(*offsets.get(row)? as usize..*offsets.get(row + 1)? as usize)
    }

    /// All values, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        (0..self.len()).map(|row| self.get(row).unwrap_or_default())
    }
}

/// Lists of different lengths, stored together: all their values, and the offsets of each level of lists.
///
/// Lists of strings are lists of lists of bytes. Clones share their memory.
#[derive(Clone, Debug)]
pub struct Ragged(pub(crate) Arc<Array>);

impl Ragged {
    /// How many rows there are.
    pub fn rows(&self) -> usize {
        self.0.rows
    }

    /// The number of levels of lists: 1 for plain lists, 2 for lists of lists.
    pub fn lists(&self) -> usize {
        self.0.offsets.len()
    }

    /// The offsets of a level: where each list begins among its elements, and the end of the last one. Level 0 is the
    /// outermost.
    ///
    /// With one level, row `i` has the values `offsets(0)[i]..offsets(0)[i + 1]`.
    pub fn offsets(&self, level: usize) -> Option<&[i64]> {
        self.0.offsets.get(level).map(Vec::as_slice)
    }

    /// The values of all rows, and the offsets of each level of lists.
    ///
    /// # Shapes
    /// Values `[V]`, or `[V, B]` for binary values of `B` bytes; offsets int64 `[L + 1]` for a level of `L` lists.
    ///
    /// # Errors
    /// [`DataError::Torch`].
    pub fn into_tensors(self) -> Result<(Tensor, Vec<Tensor>), DataError> {
        let Array { element, offsets, values, .. } = Arc::unwrap_or_clone(self.0);
        let count = (values.bytes().len() / element.bytes()) as i64;
        let shape = match element {
            Element::Fixed(bytes) => vec![count, bytes as i64],
            _ => vec![count],
        };
        let offsets = offsets.into_iter().map(|offsets| {
            let length = offsets.len() as i64;
            Ok(overdrive_ffi::tensor_from_vec(offsets, Kind::Int64, &[length])?)
        });
        Ok((values.into_tensor(element.kind(), &shape)?, offsets.collect::<Result<_, DataError>>()?))
    }

    /// A tensor with a row for each list, padded with `value`, and the lengths of the lists.
    ///
    /// The rows are as long as the longest list, or `max_len` if given: longer lists are truncated, and their length is
    /// `max_len`.
    ///
    /// # Shapes
    /// `[N, max_len]` of the column's kind, and int64 `[N]`.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for lists of lists and of binary values, for a `value` that the column's kind
    /// cannot hold, and for more than 2^40 bytes; [`DataError::Torch`].
    ///
    /// # Source
    /// `torch.nested.to_padded_tensor`, `torch.nn.utils.rnn.pad_sequence`.
    #[doc(alias = "pad_sequence")]
    pub fn to_padded(&self, value: f64, max_len: Option<usize>) -> Result<(Tensor, Tensor), DataError> {
        let Array { element, rows, ref values, .. } = *self.0;
        let [offsets] = self.0.offsets.as_slice() else {
            return Err(DataError::option("to_padded", "one level of lists", self.lists()));
        };
        let pad = encode(element, value)
            .ok_or_else(|| DataError::option("to_padded", format!("a value of {element:?}"), value))?;
        let lengths = offsets.windows(2).map(|pair| (pair[1] - pair[0]) as usize);
        let width = max_len.unwrap_or_else(|| lengths.clone().max().unwrap_or(0));
        let lengths: Vec<i64> = lengths.map(|length| length.min(width) as i64).collect();

        let row_bytes = width.saturating_mul(pad.len());
        let bytes = row_bytes.saturating_mul(rows);
        if bytes > 1 << 40 {
            return Err(DataError::option("max_len", "at most 2^40 bytes in total", format!("{rows} rows of {width}")));
        }
        let mut padded = Words::new(bytes)?;
        let lists = offsets.iter().zip(&lengths);
        for (row, (&start, &length)) in padded.bytes_mut().chunks_exact_mut(row_bytes.max(1)).zip(lists) {
            let (list, rest) = row.split_at_mut(length as usize * pad.len());
            list.copy_from_slice(&values.bytes()[start as usize * pad.len()..][..list.len()]);
            rest.chunks_exact_mut(pad.len()).for_each(|place| place.copy_from_slice(&pad));
        }
        let shape = [rows as i64, width as i64];
        let lengths = overdrive_ffi::tensor_from_vec(lengths, Kind::Int64, &shape[..1])?;
        Ok((padded.into_tensor(element.kind(), &shape)?, lengths))
    }

    /// A tensor with a row for each list; all must have the same length.
    ///
    /// # Shapes
    /// `[N, M]` of the column's kind.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for lists of different lengths (with the first row that differs), and for lists of
    /// lists.
    pub fn to_tensor(&self) -> Result<Tensor, DataError> {
        let Array { element, rows, ref offsets, ref values, .. } = *self.0;
        if offsets.len() != 1 || matches!(element, Element::Fixed(_)) {
            return Err(DataError::option("to_tensor", "one number list per row", format!("{} lists", self.lists())));
        }
        let length = self.0.uniform().map_err(|(row, length)| {
            DataError::option("to_tensor", "lists of one length", format!("one of {length} in row {row}"))
        })?;
        tensor_from_bytes(values.bytes(), element.kind(), &[rows as i64, length])
    }
}
