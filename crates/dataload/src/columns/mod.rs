//! Columns in memory, whichever format they come from.
//!
//! ```text
//! Array ── Column ── Table      the rows of a batch: tensors, lists, strings
//! (plain     └────── Row        one row
//! memory)
//! ```

mod array;
mod element;
mod field;
mod parts;
mod ragged;
mod recent;
mod row;
mod selection;
mod table;
mod words;

#[cfg(test)]
pub(crate) use array::COPIED;
pub(crate) use array::{Array, Place};
pub(crate) use element::Element;
pub use field::{Field, FieldKind};
pub(crate) use parts::{Part, Parts, same_columns};
pub use ragged::Ragged;
pub(crate) use recent::Recent;
pub use row::{Row, Value};
pub(crate) use selection::{Leaf, OnNull, Selected, Selection};
#[cfg(feature = "arrow")]
pub(crate) use table::mask_name;
pub use table::{BytesColumn, Column, Table};
pub(crate) use words::{Spare, Words};
