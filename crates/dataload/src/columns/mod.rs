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
mod ragged;
mod recent;
mod row;
mod table;
mod words;

pub(crate) use array::{Array, Place};
pub(crate) use element::{Element, encode};
pub use field::{Field, FieldKind};
pub use ragged::Ragged;
pub(crate) use recent::Recent;
pub use row::{Row, Value};
pub use table::{BytesColumn, Column, Table};
pub(crate) use words::{Spare, Words};
