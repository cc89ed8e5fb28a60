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
mod recent;
mod row;
mod table;
mod words;

pub(crate) use array::{Array, Grown};
pub(crate) use element::{Element, encode};
pub use field::{Field, FieldKind};
pub(crate) use recent::Recent;
pub use row::{Row, Value};
pub use table::{BytesColumn, Column, Ragged, Table};
pub(crate) use words::{Spare, Words};
