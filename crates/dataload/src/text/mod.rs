//! Text files whose rows are read in any order.

#[cfg(feature = "csv")]
mod csv;
#[cfg(feature = "jsonl")]
mod json_lines;
mod rows;

#[cfg(feature = "csv")]
pub use self::csv::{CsvDataset, CsvDatasetBuilder};
#[cfg(feature = "jsonl")]
pub use json_lines::JsonLines;
