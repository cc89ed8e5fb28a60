//! The values read from a column: a tensor, lists of different lengths, or strings.

use std::sync::Arc;

use tch::Tensor;

use super::array::Array;
use super::element::Element;
use super::ragged::Ragged;
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
        pinned: bool,
    ) -> Result<Self, DataError> {
        let (mut columns, mut masks) = (Vec::with_capacity(arrays.len()), Vec::new());
        for (name, mut array) in names.zip(arrays) {
            let mask = array.mask.take();
            columns.push((name.clone(), array.into_values(pinned)?));
            if let Some(mask) = mask {
                let name: Arc<str> = mask_name(&name).into();
                masks.push(name.clone());
                columns.push((name, mask.into_values(pinned)?));
            }
        }
        Ok(Self { rows, columns, masks })
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

/// Covers numbers and lists; strings and binary values stay on the host.
impl TensorBatch for Table {
    fn map_tensors(&self, change: &mut dyn FnMut(&Tensor) -> Result<Tensor, DataError>) -> Result<Self, DataError> {
        let columns = self.columns.iter().map(|(name, values)| {
            let values = match values {
                Column::Tensor(tensor) => Column::Tensor(change(tensor)?),
                Column::Ragged(ragged) => Column::Ragged(ragged.map_tensors(change)?),
                Column::Bytes(bytes) => Column::Bytes(bytes.clone()),
            };
            Ok((name.clone(), values))
        });
        let columns = columns.collect::<Result<_, DataError>>()?;
        Ok(Self { rows: self.rows, columns, masks: self.masks.clone() })
    }

    fn visit_tensors<'a>(&'a self, visit: &mut dyn FnMut(&'a Tensor)) {
        for (_, values) in &self.columns {
            match values {
                Column::Tensor(tensor) => visit(tensor),
                Column::Ragged(ragged) => ragged.visit_tensors(visit),
                Column::Bytes(_) => {}
            }
        }
    }

    fn bytes_of_strings(&self) -> usize {
        let bytes = |(_, values): &(_, Column)| if let Column::Bytes(bytes) = values { bytes.bytes() } else { 0 };
        self.columns.iter().map(bytes).sum()
    }
}

/// The name of the column that says where the column `name` has nulls.
pub(crate) fn mask_name(name: &str) -> String {
    format!("{name}.is_null")
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
    /// The values as a column. The tensors of lists are in pinned memory when `pinned`, if their values are.
    pub(crate) fn into_values(self, pinned: bool) -> Result<Column, DataError> {
        let (rows, kind) = (self.rows as i64, self.element.kind());
        Ok(match (self.offsets.len(), self.element) {
            (0, Element::Fixed(bytes)) => Column::Tensor(self.values.into_tensor(kind, &[rows, bytes as i64])?),
            (0, _) => {
                let shape: Vec<i64> = [rows].into_iter().chain(self.per_row.map(|length| length as i64)).collect();
                Column::Tensor(self.values.into_tensor(kind, &shape)?)
            }
            (1, Element::Bytes) => Column::Bytes(BytesColumn(Arc::new(self))),
            _ => Column::Ragged(Ragged::new(self, pinned)?),
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

    /// The bytes of all values, and of where each begins.
    pub(crate) fn bytes(&self) -> usize {
        let offsets: usize = self.0.offsets.iter().map(|offsets| size_of_val(offsets.as_slice())).sum();
        self.0.values.bytes().len() + offsets
    }

    /// All values, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        (0..self.len()).map(|row| self.get(row).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::columns::words::Words;
    use crate::tensor_batch::footprint_of;

    #[test]
    fn the_bytes_of_a_table_are_those_of_all_its_columns() -> Result<(), DataError> {
        let texts = Array::of_lists(Element::Bytes, vec![vec![0, 500, 1000]], Words::new(1000)?);
        let numbers = Array::of_values(Element::Int16, 2, Words::new(4)?);
        let names = ["text", "number"].map(Arc::from).into_iter();
        let table = Table::new(names, vec![texts, numbers], 2, false)?;
        assert_eq!(footprint_of(&table).host, 1000 + 3 * 8 + 4);
        // Strings stay where they are when tensors are moved.
        assert_eq!(footprint_of(&table.map_tensors(&mut |tensor| Ok(tensor.shallow_clone()))?).host, 1000 + 3 * 8 + 4);
        Ok(())
    }
}
