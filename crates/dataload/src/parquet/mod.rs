//! Parquet: columns of numbers, strings and lists, in row groups.
//!
//! ```text
//! source ── footer ── pages ── chunk ── array ── column ── ParquetTable
//! (pread)   (checked) (checked, (parquet  (plain    (tensors)
//!                     unpacked) decodes)  memory)
//! ```

mod array;
mod batches;
mod buffers;
mod chunk;
mod codec;
mod column;
mod dataset;
mod decode;
mod delta;
mod element;
mod epoch;
mod field;
mod footer;
mod guard;
mod in_order;
mod levels;
mod lists;
mod loader;
mod page_header;
mod pages;
mod recent;
mod row;
mod source;
mod thrift;
mod words;

pub use batches::ParquetBatches;
pub use column::{BytesColumn, ParquetTable, ParquetValues, Ragged};
pub use dataset::ParquetDataset;
pub use epoch::ParquetEpoch;
pub use field::{ParquetField, ParquetKind};
pub use loader::MakeBatch;
pub use row::{ParquetRow, ParquetValue};
