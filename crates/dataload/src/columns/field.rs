//! The columns of a schema, and the kinds that their values are read as.

use std::sync::Arc;

use tch::Kind;

/// A column of numbers, strings or lists of them; see `fields` of `ParquetDataset` and `ArrowDataset`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    pub(crate) name: Arc<str>,
    pub(crate) kind: FieldKind,
    pub(crate) lists: usize,
    pub(crate) nullable: bool,
}

/// The type that the values of a column are read as.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FieldKind {
    /// Numbers or bools.
    Number(Kind),
    /// Strings or binary values, of any length each.
    Bytes,
    /// Binary values of this many bytes each, read as uint8.
    FixedBytes(usize),
    /// The name of a type that has no [`Kind`]: `uint64`, decimals, unions. A column of it cannot be read; the others
    /// can.
    Unsupported(String),
}

impl Field {
    /// The column's name. Columns of a structure are named `structure.column`, as are those of a list of structures;
    /// those of a map are `map.key` and `map.value`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The type of its values.
    pub fn kind(&self) -> &FieldKind {
        &self.kind
    }

    /// The number of list levels: 0 for a plain column, 1 for lists, 2 for lists of lists. Arrow's lists of a fixed
    /// length count only where they do not become a tensor's dimension.
    pub fn lists(&self) -> usize {
        self.lists
    }

    /// Whether a value, or a list or structure around it, may be missing.
    pub fn nullable(&self) -> bool {
        self.nullable
    }
}
