//! Arrow: record batches in memory, IPC files and streams, datasets that Hugging Face's `datasets` has saved.
//!
//! ```text
//! file ── message ──┐
//! (mapped) (checked) ├─ Node ── read ── Array ── Table, Row
//! RecordBatch ───────┘  (lent   (copies the rows that
//!                       bytes)   are asked for)
//! ```
//!
//! Files are not given to the `arrow-ipc` crate's reader: it needs the bytes of a whole record batch for any row of it,
//! and this crate copies out of mapped files and never lends them.

mod columns;
mod dataset;
mod file;
mod from_batch;
mod hugging_face;
mod layout;
mod message;
mod node;
mod read;
mod rows;
mod to_batch;
mod unpack;
mod values;
mod writer;

pub use columns::ArrowColumns;
pub use dataset::ArrowDataset;
pub use writer::ArrowWriter;
