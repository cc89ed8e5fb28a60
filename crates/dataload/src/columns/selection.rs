//! Chooses the columns of a schema that are read, and what nulls become.

use std::path::Path;
use std::sync::Arc;

use super::element::{Element, encode};
use super::field::{Field, FieldKind};
use super::table::mask_name;
use crate::DataError;
use crate::loader::fingerprint;

/// A column as a format's schema describes it.
pub(crate) trait Leaf {
    fn field(&self) -> &Field;

    /// How its values are stored; `None` if their type is not supported.
    fn element(&self) -> Option<Element>;

    /// Whether rows of both may be in one dataset.
    fn is_like(&self, other: &Self) -> bool;

    /// Its name and type, for errors.
    fn describe(&self) -> String;

    /// Whether it is the column of this name, or in the structure of this name.
    fn is_named(&self, name: &str) -> bool {
        let rest = self.field().name().strip_prefix(name);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    }
}

/// The columns of a schema, and which of them are read.
#[derive(Clone)]
pub(crate) struct Selection<L> {
    leaves: Arc<[L]>,
    /// Those that are read, in order.
    selected: Arc<[Selected]>,
    /// The file that a missing column is an error of; without one it is an error of the call.
    path: Option<Arc<Path>>,
}

/// A column that is read.
#[derive(Clone)]
pub(crate) struct Selected {
    pub(crate) leaf: usize,
    pub(crate) name: Arc<str>,
    pub(crate) nulls: OnNull,
    /// The length that every list must have.
    pub(crate) list_size: Option<usize>,
}

/// What nulls of a column become.
#[derive(Clone, Debug)]
pub(crate) enum OnNull {
    Error,
    /// The bytes of a value.
    Fill(Arc<[u8]>),
    /// A zero, or nothing, and an entry in the mask.
    Mask,
}

impl OnNull {
    /// The value that replaces a null, which has `size` bytes, or any size if that is 0; `None` if null is an error.
    pub(crate) fn fill(&self, size: usize) -> Option<Arc<[u8]>> {
        match self {
            Self::Error => None,
            Self::Fill(fill) => Some(fill.clone()),
            Self::Mask => Some(vec![0; size].into()),
        }
    }
}

impl<L: Leaf> Selection<L> {
    /// All columns.
    pub(crate) fn new(leaves: Vec<L>, path: Option<Arc<Path>>) -> Self {
        let selected = leaves.iter().enumerate().map(Selected::new).collect();
        Self { leaves: leaves.into(), selected, path }
    }

    pub(crate) fn select<N: AsRef<str>>(mut self, columns: impl IntoIterator<Item = N>) -> Result<Self, DataError> {
        let mut selected = Vec::new();
        for name in columns {
            let (name, before) = (name.as_ref(), selected.len());
            let named = self.leaves.iter().enumerate().filter(|(_, leaf)| leaf.is_named(name));
            selected.extend(named.map(Selected::new));
            if selected.len() == before {
                return Err(self.no_column(name));
            }
        }
        self.selected = selected.into();
        Ok(self)
    }

    pub(crate) fn fill_null(self, column: &str, value: f64) -> Result<Self, DataError> {
        let leaf = self.find(column)?;
        let fill = leaf.element().and_then(|element| encode(element, value));
        let expected = || format!("a value of {:?}", leaf.field().kind());
        let fill = fill.ok_or_else(|| DataError::option("fill_null", expected(), value))?;
        self.changed(column, |selected| selected.nulls = OnNull::Fill(fill.clone().into()))
    }

    pub(crate) fn fill_null_bytes(self, column: &str, value: &[u8]) -> Result<Self, DataError> {
        match self.find(column)?.field().kind() {
            FieldKind::Bytes => {}
            FieldKind::FixedBytes(bytes) if *bytes == value.len() => {}
            kind => {
                let found = format!("{} bytes", value.len());
                return Err(DataError::option("fill_null_bytes", format!("a value of {kind:?}"), found));
            }
        }
        self.changed(column, |selected| selected.nulls = OnNull::Fill(value.into()))
    }

    pub(crate) fn mask_null(self, column: &str) -> Result<Self, DataError> {
        self.find(column)?;
        let mask = mask_name(column);
        if self.leaves.iter().any(|leaf| leaf.field().name() == mask) {
            return Err(DataError::option("mask_null", format!("a schema without a column {mask:?}"), "one with it"));
        }
        self.changed(column, |selected| selected.nulls = OnNull::Mask)
    }

    /// Changes a selected column.
    pub(crate) fn changed(mut self, column: &str, change: impl Fn(&mut Selected)) -> Result<Self, DataError> {
        let mut selected = self.selected.to_vec();
        selected.iter_mut().filter(|selected| &*selected.name == column).for_each(change);
        self.selected = selected.into();
        Ok(self)
    }

    #[cfg(feature = "arrow")]
    pub(crate) fn leaves(&self) -> &[L] {
        &self.leaves
    }

    pub(crate) fn leaf(&self, selected: &Selected) -> &L {
        &self.leaves[selected.leaf]
    }

    /// The selected columns, in order.
    pub(crate) fn selected(&self) -> &[Selected] {
        &self.selected
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = Arc<str>> {
        self.selected.iter().map(|selected| selected.name.clone())
    }

    pub(crate) fn fields(&self) -> impl ExactSizeIterator<Item = &Field> {
        self.selected.iter().map(|selected| self.leaf(selected).field())
    }

    /// The selected column of this name.
    pub(crate) fn find(&self, column: &str) -> Result<&L, DataError> {
        let selected = self.selected.iter().find(|selected| &*selected.name == column);
        selected.map(|selected| self.leaf(selected)).ok_or_else(|| self.no_column(column))
    }

    /// A checksum of the selected columns and of what nulls become; 0 for all columns as they are. Positions in a stream
    /// of rows depend on it, because they count bytes.
    pub(crate) fn fingerprint(&self) -> u64 {
        let is_plain = |it: &Selected| matches!(it.nulls, OnNull::Error) && it.list_size.is_none();
        if self.selected.len() == self.leaves.len() && self.selected.iter().all(is_plain) {
            return 0;
        }
        let chosen = self.selected.iter().map(|it| (&it.name, &it.nulls, it.list_size));
        fingerprint(&chosen.collect::<Vec<_>>())
    }

    fn no_column(&self, name: &str) -> DataError {
        let names: Vec<&str> = self.leaves.iter().map(|leaf| leaf.field().name()).collect();
        match &self.path {
            Some(path) => DataError::layout(path, format!("a column {name:?}"), format!("the columns {names:?}")),
            None => DataError::option("column", format!("one of {names:?}"), format!("{name:?}")),
        }
    }
}

impl Selected {
    fn new<L: Leaf>((leaf, of): (usize, &L)) -> Self {
        Self { leaf, name: of.field().name.clone(), nulls: OnNull::Error, list_size: None }
    }
}
