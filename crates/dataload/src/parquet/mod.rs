//! Parquet: columns of numbers, strings and lists, in row groups.
//!
//! ```text
//! file ──── footer ── pages ── chunk ── array ── column ── Table
//! (pread)   (checked) (checked, (parquet  (plain    (tensors)
//!                     unpacked) decodes)  memory)
//! ```

mod batches;
mod buffers;
mod chunk;
mod codec;
mod dataset;
mod decode;
mod delta;
mod element;
mod epoch;
mod field;
mod file;
mod footer;
mod guard;
mod levels;
mod lists;
mod loader;
mod page_header;
mod pages;
mod rank_windows;
mod row;
mod thrift;
mod window;
mod windows;

pub use batches::ParquetBatches;
pub use dataset::ParquetDataset;
pub use epoch::ParquetEpoch;
pub use loader::{FromParquet, WholeTable};
