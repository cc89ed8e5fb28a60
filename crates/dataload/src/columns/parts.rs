//! Where the rows of a dataset of several files are.

use std::path::Path;
use std::sync::Arc;

use super::selection::Leaf;
use crate::DataError;

/// A row group or a record batch, and the position of its rows in the dataset.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) file: usize,
    /// Its number in its file.
    pub(crate) index: usize,
    pub(crate) first_row: usize,
    pub(crate) rows: usize,
}

/// All row groups or record batches, file after file.
#[derive(Clone, Debug, Default)]
pub(crate) struct Parts(Arc<Vec<Part>>);

impl Parts {
    /// Adds those of one more file, with the number of rows of each where it can be counted.
    pub(crate) fn add(
        &mut self,
        file: usize,
        path: &Path,
        rows: impl Iterator<Item = Option<usize>>,
    ) -> Result<(), DataError> {
        let mut first_row = self.rows();
        for (index, rows) in rows.enumerate() {
            let end = rows.and_then(|rows| first_row.checked_add(rows));
            let (Some(rows), Some(end)) = (rows, end) else {
                return Err(DataError::layout(path, "rows that can be counted", format!("more in part {index}")));
            };
            Arc::make_mut(&mut self.0).push(Part { file, index, first_row, rows });
            first_row = end;
        }
        Ok(())
    }

    pub(crate) fn iter(&self) -> std::slice::Iter<'_, Part> {
        self.0.iter()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// How many rows all of them have.
    pub(crate) fn rows(&self) -> usize {
        self.0.last().map_or(0, |part| part.first_row + part.rows)
    }

    pub(crate) fn get(&self, index: usize) -> Result<Part, DataError> {
        self.0.get(index).copied().ok_or(DataError::IndexOutOfRange { index, len: self.len() })
    }

    /// The part that has a row of the dataset, and the row's number in it.
    pub(crate) fn find(&self, row: usize) -> Result<(usize, usize), DataError> {
        let len = self.rows();
        DataError::check_index(row, len)?;
        // The last one that begins at or before the row, which skips empty ones.
        let part = self.0.partition_point(|part| part.first_row <= row) - 1;
        Ok((part, row - self.0[part].first_row))
    }

    /// The rows of a part from a position on.
    pub(crate) fn rows_from(&self, part: usize, position: u64) -> Result<std::ops::Range<usize>, DataError> {
        let rows = self.get(part)?.rows;
        Ok(usize::try_from(position).unwrap_or(usize::MAX).min(rows)..rows)
    }
}

impl std::ops::Index<usize> for Parts {
    type Output = Part;

    fn index(&self, part: usize) -> &Part {
        &self.0[part]
    }
}

/// Checks that a file has the columns of the first one.
pub(crate) fn same_columns<L: Leaf>(first: &[L], found: &[L], path: &Path) -> Result<(), DataError> {
    if let Some((first, found)) = first.iter().zip(found).find(|(first, found)| !first.is_like(found)) {
        let expected = format!("the first file's column {}", first.describe());
        return Err(DataError::layout(path, expected, found.describe()));
    }
    match first.len() == found.len() {
        true => Ok(()),
        false => {
            let expected = format!("the first file's {} columns", first.len());
            Err(DataError::layout(path, expected, found.len().to_string()))
        }
    }
}
