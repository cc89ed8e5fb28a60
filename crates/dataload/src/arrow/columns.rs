//! Which columns of an Arrow schema are read.

use std::ops::Range;

use arrow_schema::{Fields, Schema};

use super::layout::{Leaf, leaves};
use super::node::Node;
use super::read::{ReadError, Reader};
use crate::DataError;
use crate::columns::{Array, Field, Selected, Selection};

/// Which columns of an Arrow schema become tensors, and what their nulls become.
///
/// ```
/// use std::sync::Arc;
///
/// use arrow_array::{Float32Array, RecordBatch, StringArray};
/// use overdrive_dataload::ArrowColumns;
///
/// let batch = RecordBatch::try_from_iter([
///     ("weight", Arc::new(Float32Array::from(vec![0.5, 1.0])) as arrow_array::ArrayRef),
///     ("name", Arc::new(StringArray::from(vec![Some("a"), None]))),
/// ])?;
/// let columns = ArrowColumns::new(&batch.schema()).mask_null("name")?;
/// let table = columns.table(batch)?;
/// assert_eq!(Vec::<f32>::try_from(table.tensor("weight")?)?, [0.5, 1.0]);
/// assert_eq!(table.bytes("name")?.get(0), Some(&b"a"[..]));
/// assert_eq!(Vec::<bool>::try_from(table.tensor("name.is_null")?)?, [false, true]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Numbers, bools, dates and times become tensors `[N]`; dates and times are their stored numbers. `uint16` becomes
/// [`Kind::Int`](tch::Kind) and `uint32` [`Kind::Int64`](tch::Kind), which have all their values. Fixed-size lists
/// become tensors `[N, M]`; of nested ones, `M` is the product of the lengths. Other lists become
/// [`Ragged`](crate::Ragged), strings and binary values [`BytesColumn`](crate::BytesColumn)s. The fields of a structure
/// are separate columns, `structure.column`. A dictionary-encoded column is decoded. A null is an error unless
/// [`fill_null`](Self::fill_null) or [`mask_null`](Self::mask_null) says what it becomes.
///
/// # Source
/// `pyarrow.RecordBatch.to_tensor`, `datasets.Dataset.with_format("torch")`.
#[derive(Clone)]
pub struct ArrowColumns {
    fields: Fields,
    pub(super) selection: Selection<Leaf>,
}

impl ArrowColumns {
    /// All columns of a schema.
    pub fn new(schema: &Schema) -> Self {
        Self { fields: schema.fields().clone(), selection: Selection::new(leaves(schema), None) }
    }

    /// Reads only these columns, in this order. The name of a structure selects all its columns.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a column that does not exist.
    pub fn select<N: AsRef<str>>(self, columns: impl IntoIterator<Item = N>) -> Result<Self, DataError> {
        Ok(Self { selection: self.selection.select(columns)?, ..self })
    }

    /// Reads nulls of a column of numbers as `value`. A null fixed-size list becomes a list of this value, any other
    /// null list an empty one. Call it after [`select`](Self::select).
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a column that is not selected, for one of strings or binary values (see
    /// [`fill_null_bytes`](Self::fill_null_bytes)), and for a value that the column's kind cannot hold.
    ///
    /// # Source
    /// `pyarrow.compute.fill_null`.
    pub fn fill_null(self, column: &str, value: f64) -> Result<Self, DataError> {
        Ok(Self { selection: self.selection.fill_null(column, value)?, ..self })
    }

    /// Reads nulls of a column of strings or binary values as `value`, and null lists as empty ones. Call it after
    /// [`select`](Self::select).
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a column that is not selected, for one of numbers, and for a value of another
    /// length where the length is fixed.
    pub fn fill_null_bytes(self, column: &str, value: &[u8]) -> Result<Self, DataError> {
        Ok(Self { selection: self.selection.fill_null_bytes(column, value)?, ..self })
    }

    /// Reads nulls of a column as zeros, or as empty, and adds the column `column.is_null`, which says where they are.
    /// Call it after [`select`](Self::select).
    ///
    /// Nulls within lists stay errors, because the mask has one entry per row.
    ///
    /// # Shapes
    /// The column of nulls: bool `[N]`.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a column that is not selected, and where the schema has a column of that name.
    ///
    /// # Source
    /// `pyarrow.compute.is_null`.
    #[doc(alias = "is_null")]
    pub fn mask_null(self, column: &str) -> Result<Self, DataError> {
        Ok(Self { selection: self.selection.mask_null(column)?, ..self })
    }

    /// The columns that are read, in order; all of the schema unless [`select`](Self::select) was called.
    pub fn fields(&self) -> impl ExactSizeIterator<Item = &Field> {
        self.selection.fields()
    }

    /// The schema's fields.
    pub(super) fn of_fields(&self) -> &Fields {
        &self.fields
    }

    /// The columns of a table without rows.
    pub(super) fn empty(&self) -> Result<Vec<Array>, DataError> {
        let empty = |selected: &Selected| {
            let leaf = self.selection.leaf(selected);
            let node = |_| Node { len: 0, offset: 0, valid: None, buffers: Vec::new() };
            let nodes: Vec<Node<'_>> = leaf.levels.iter().map(node).collect();
            read(selected, leaf, &nodes, 0..0, None, 0).map_err(|bad| refused(&selected.name, bad))
        };
        self.selection.selected().iter().map(empty).collect()
    }
}

/// The rows of a column.
pub(super) fn read(
    selected: &Selected,
    leaf: &Leaf,
    nodes: &[Node<'_>],
    rows: Range<usize>,
    dictionary: Option<&Array>,
    limit: u64,
) -> Result<Array, ReadError> {
    Reader { leaf, nulls: &selected.nulls, dictionary, limit }.read(nodes, rows)
}

/// The error for a column of a record batch in memory.
pub(super) fn refused(column: &str, bad: ReadError) -> DataError {
    describe(column, bad)
        .map_or_else(|error| error, |described| DataError::option("column", described.expected, described.found))
}

/// The error for a column: what was expected, and what was found in which row of the batch.
pub(super) fn describe(name: &str, bad: ReadError) -> Result<Described, DataError> {
    Ok(match bad {
        ReadError::Null { row } => Described {
            expected: format!("a value in every row of column {name:?}, or a `fill_null` or `mask_null` for it"),
            found: format!("a null in row {row}"),
            is_damage: false,
        },
        ReadError::Malformed { row, expected } => Described {
            expected: format!("{expected} in column {name:?}"),
            found: format!("other content from row {row} on"),
            is_damage: true,
        },
        ReadError::TooLarge { bytes } => Described {
            expected: format!("a smaller part of column {name:?}, or a higher `max_column_bytes`"),
            found: format!("{bytes} bytes"),
            is_damage: false,
        },
        ReadError::Unsupported(found) => Described {
            expected: format!("a supported type in column {name:?}, or a `select` without that column"),
            found,
            is_damage: false,
        },
        ReadError::Other(error) => return Err(error),
    })
}

/// What was expected of a column, and what was found.
pub(super) struct Described {
    pub(super) expected: String,
    pub(super) found: String,
    /// Whether the file contradicts its format.
    pub(super) is_damage: bool,
}
