//! Chooses the columns of a schema that are read, and what nulls become.

use std::ops::Range;
use std::sync::Arc;

use arrow_schema::{Fields, Schema};

use super::layout::{Leaf, leaves};
use super::node::Node;
use super::read::{ReadError, Reader};
use crate::DataError;
use crate::columns::{Array, Element, Field, FieldKind, Words, encode};
use crate::loader::fingerprint;

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
    /// All columns.
    leaves: Arc<[Leaf]>,
    /// Those that are read, in order.
    selected: Arc<[Selected]>,
}

/// A column that is read.
#[derive(Clone)]
pub(super) struct Selected {
    pub(super) leaf: usize,
    pub(super) nulls: OnNull,
    /// The names of its columns in a table: its own and, where nulls are masked, that of the mask.
    pub(super) name: Arc<str>,
    mask_name: Arc<str>,
}

/// What nulls of a column become.
#[derive(Clone, Debug)]
pub(super) enum OnNull {
    Error,
    /// The bytes of a value.
    Fill(Arc<[u8]>),
    /// A zero, or nothing, and an entry in one more column.
    Mask,
}

impl ArrowColumns {
    /// All columns of a schema.
    pub fn new(schema: &Schema) -> Self {
        let leaves = leaves(schema);
        let selected = (0..leaves.len()).map(|leaf| Selected::new(leaf, &leaves[leaf])).collect();
        Self { fields: schema.fields().clone(), leaves: leaves.into(), selected }
    }

    /// Reads only these columns, in this order. The name of a structure selects all its columns.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a column that does not exist.
    pub fn select<N: AsRef<str>>(mut self, columns: impl IntoIterator<Item = N>) -> Result<Self, DataError> {
        let mut selected = Vec::new();
        for name in columns {
            let name = name.as_ref();
            let is_named = |leaf: &Leaf| {
                let rest = leaf.field.name().strip_prefix(name);
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
            };
            let before = selected.len();
            let leaves = self.leaves.iter().enumerate().filter(|(_, leaf)| is_named(leaf));
            selected.extend(leaves.map(|(number, leaf)| Selected::new(number, leaf)));
            if selected.len() == before {
                return Err(self.no_column(name));
            }
        }
        self.selected = selected.into();
        Ok(self)
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
        let kind = self.find(column)?.field.kind();
        let fill = self.element(column)?.and_then(|element| encode(element, value));
        let fill = fill.ok_or_else(|| DataError::option("fill_null", format!("a value of {kind:?}"), value))?;
        self.with_nulls(column, OnNull::Fill(fill.into()))
    }

    /// Reads nulls of a column of strings or binary values as `value`, and null lists as empty ones. Call it after
    /// [`select`](Self::select).
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a column that is not selected, for one of numbers, and for a value of another
    /// length where the length is fixed.
    pub fn fill_null_bytes(self, column: &str, value: &[u8]) -> Result<Self, DataError> {
        match self.find(column)?.field.kind() {
            FieldKind::Bytes => {}
            FieldKind::FixedBytes(bytes) if *bytes == value.len() => {}
            kind => {
                let found = format!("{} bytes", value.len());
                return Err(DataError::option("fill_null_bytes", format!("a value of {kind:?}"), found));
            }
        }
        self.with_nulls(column, OnNull::Fill(value.into()))
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
        self.find(column)?;
        let mask = format!("{column}.is_null");
        if self.leaves.iter().any(|leaf| leaf.field.name() == mask) {
            return Err(DataError::option("mask_null", format!("a schema without a column {mask:?}"), "one with it"));
        }
        self.with_nulls(column, OnNull::Mask)
    }

    /// The columns that are read, in order; all of the schema unless [`select`](Self::select) was called.
    pub fn fields(&self) -> impl ExactSizeIterator<Item = &Field> {
        self.selected.iter().map(|selected| &self.leaf(selected).field)
    }

    /// The names of the columns of nulls.
    pub(super) fn masks(&self) -> Vec<Arc<str>> {
        let masked = self.selected.iter().filter(|selected| matches!(selected.nulls, OnNull::Mask));
        masked.map(|selected| selected.mask_name.clone()).collect()
    }

    /// A checksum of the selected columns and of what nulls become; 0 for all columns without a rule for nulls.
    /// Positions in a stream of rows depend on it, because they count bytes.
    pub(super) fn fingerprint(&self) -> u64 {
        let chosen = |selected: &Selected| (selected.leaf, selected.nulls.clone());
        let chosen: Vec<_> = self.selected.iter().map(chosen).collect();
        let is_all =
            chosen.len() == self.leaves.len() && chosen.iter().all(|(_, nulls)| matches!(nulls, OnNull::Error));
        let named =
            |(leaf, nulls): &(usize, OnNull)| (self.leaves[*leaf].field.name().to_owned(), format!("{nulls:?}"));
        if is_all { 0 } else { fingerprint(&chosen.iter().map(named).collect::<Vec<_>>()) }
    }

    /// The schema's fields.
    pub(super) fn of_fields(&self) -> &Fields {
        &self.fields
    }

    pub(super) fn leaf(&self, selected: &Selected) -> &Leaf {
        &self.leaves[selected.leaf]
    }

    pub(super) fn leaves(&self) -> &[Leaf] {
        &self.leaves
    }

    pub(super) fn selected(&self) -> &[Selected] {
        &self.selected
    }

    /// The columns of a table without rows.
    pub(super) fn empty(&self) -> Result<Vec<(Arc<str>, Array)>, DataError> {
        let mut columns = Vec::new();
        for selected in self.selected() {
            let leaf = self.leaf(selected);
            let node = |_| Node { len: 0, offset: 0, valid: None, buffers: Vec::new() };
            let nodes: Vec<Node<'_>> = leaf.levels.iter().map(node).collect();
            columns.extend(selected.read(leaf, &nodes, 0..0, None, 0).map_err(|bad| selected.refused(bad))?);
        }
        Ok(columns)
    }

    fn element(&self, column: &str) -> Result<Option<Element>, DataError> {
        Ok(self.find(column)?.stored().map(|stored| stored.element()))
    }

    fn find(&self, column: &str) -> Result<&Leaf, DataError> {
        let selected = self.selected.iter().find(|selected| &*selected.name == column);
        selected.map(|selected| self.leaf(selected)).ok_or_else(|| self.no_column(column))
    }

    fn with_nulls(mut self, column: &str, nulls: OnNull) -> Result<Self, DataError> {
        let mut selected = self.selected.to_vec();
        let named = selected.iter_mut().filter(|selected| &*selected.name == column);
        named.for_each(|selected| selected.nulls = nulls.clone());
        self.selected = selected.into();
        Ok(self)
    }

    fn no_column(&self, name: &str) -> DataError {
        let names: Vec<&str> = self.leaves.iter().map(|leaf| leaf.field.name()).collect();
        DataError::option("column", format!("one of {names:?}"), format!("{name:?}"))
    }
}

impl Selected {
    fn new(leaf: usize, of: &Leaf) -> Self {
        let name = of.field.name();
        Self { leaf, nulls: OnNull::Error, name: name.into(), mask_name: format!("{name}.is_null").into() }
    }

    /// The rows of this column, with the names that they have in a table.
    pub(super) fn read(
        &self,
        leaf: &Leaf,
        nodes: &[Node<'_>],
        rows: Range<usize>,
        dictionary: Option<&Array>,
        limit: u64,
    ) -> Result<Vec<(Arc<str>, Array)>, ReadError> {
        let (array, mask) = Reader { leaf, nulls: &self.nulls, dictionary, limit }.read(nodes, rows)?;
        let mut named = vec![(self.name.clone(), array)];
        if let Some(mask) = mask {
            named.push((self.mask_name.clone(), bools(&mask)?));
        }
        Ok(named)
    }

    /// The mask of a batch in which no row is null, if nulls are masked.
    pub(super) fn empty_mask(&self, rows: usize) -> Result<Option<(Arc<str>, Array)>, DataError> {
        let mask = matches!(self.nulls, OnNull::Mask).then(|| bools(&vec![false; rows]));
        Ok(mask.transpose()?.map(|mask| (self.mask_name.clone(), mask)))
    }

    /// The error for this column of a record batch in memory.
    pub(super) fn refused(&self, bad: ReadError) -> DataError {
        self.describe(bad)
            .map_or_else(|error| error, |described| DataError::option("column", described.expected, described.found))
    }

    /// The error for this column: what was expected, and what was found in which row of the batch.
    pub(super) fn describe(&self, bad: ReadError) -> Result<Described, DataError> {
        let name = &self.name;
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
}

/// What was expected of a column, and what was found.
pub(super) struct Described {
    pub(super) expected: String,
    pub(super) found: String,
    /// Whether the file contradicts its format.
    pub(super) is_damage: bool,
}

fn bools(values: &[bool]) -> Result<Array, DataError> {
    let mut words = Words::new(values.len())?;
    words.bytes_mut().iter_mut().zip(values).for_each(|(byte, &value)| *byte = value.into());
    Ok(Array { element: Element::Bool, rows: values.len(), per_row: None, offsets: Vec::new(), values: words })
}
